"""A disturbed measurement says so itself; a quiet one says nothing."""

from nanokit.lab.experiments.tour import TourParams, TourResult
from nanokit.lab.plots import tour
from nanokit.lab.steadiness import disturbance, remarks

QUIET = [40.0 + i % 5 for i in range(50)]


def test_a_second_program_on_the_cores_is_noticed() -> None:
    """Guards a median, 13 times too slow, in bold and without a word: a third of the steps took a hundredfold."""
    [remark] = remarks({"decode_ms_per_token": QUIET + [2500.0] * 25, "stream_gb_s": [30.0, 29.0, 31.0]})
    assert remark.startswith("decode_ms_per_token varies")
    assert "do not quote" in remark


def test_a_single_late_step_is_no_disturbance() -> None:
    assert remarks({"decode_ms_per_token": [*QUIET, 900.0]}) == []


def test_few_samples_are_judged_by_their_extremes() -> None:
    assert remarks({"prefill_tok_per_s": [850.0, 911.0, 880.0]}) == []
    assert len(remarks({"prefill_tok_per_s": [54.0, 860.0, 850.0]})) == 1
    assert remarks({"prefill_tok_per_s": [1.0]}) == []


def test_the_disturbance_is_that_of_the_least_steady_series() -> None:
    assert disturbance(QUIET, [54.0, 162.0]) == 3
    assert disturbance(QUIET, [30.0, 31.0]) == 1


def test_the_figure_of_a_disturbed_run_says_so() -> None:
    samples = {"prefill_tok_per_s": [900.0], "decode_ms_per_token": QUIET, "stream_gb_s": [30.0]}
    metrics = {"prefill_ms_per_token": 1.1, "decode_ms_per_token": 41.0, "bytes_per_token": 5e8,
               "fp32_bytes_per_token": 1e8}  # fmt: skip
    titles = [
        tour(TourResult(TourParams(), metrics, samples, remarks=notes)).layout.title.text
        for notes in ([], ["decode_ms_per_token varies 60.0-fold (40 to 2500): something else"])
    ]
    assert "not to be quoted" not in titles[0]
    assert "decode_ms_per_token varies 60.0-fold (40 to 2500): not to be quoted" in titles[1]
