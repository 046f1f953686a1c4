"""Result and Table: what may differ between two runs is told by the name; tables read the same everywhere."""

import math

import pytest

from nanokit.lab.params import Params
from nanokit.lab.result import Result, figure, is_timing
from nanokit.lab.table import Table


@pytest.mark.parametrize(
    "name",
    [
        "ttft_ms",
        "decode_tok_per_s",
        "read_gb_s",
        "ms_per_token",
        "load_s",
        "itl_ms_p95",
        "bandwidth_share",
        "gpu_speedup",
        "share_of_limit",
        "ratio_to_first_at_2048",
        "vs_transformers",
    ],
)
def test_a_figure_of_the_clock_is_known_by_its_name(name):
    assert is_timing(name)


@pytest.mark.parametrize(
    "name", ["tokens", "weight_bytes", "acceptance_rate", "loss", "share_of_zeros", "bits", "items"]
)
def test_a_figure_that_must_repeat_is_known_by_its_name(name):
    """A counted figure taken for a timing would never be compared again."""
    assert not is_timing(name)


def test_the_record_is_a_copy():
    result = Result(Params(), {"tokens": 3.0}, {"ttft_ms": [1.0, 2.0]})
    record = result.to_record()
    record["metrics"]["tokens"] = 9.0
    record["samples"]["ttft_ms"].append(5.0)
    assert result.metrics == {"tokens": 3.0}
    assert result.samples == {"ttft_ms": [1.0, 2.0]}
    assert record["params"] == {"preset": "quick"}


def test_the_table_shows_value_and_spread():
    text = str(Result(Params(), {"ttft_ms": 12.345678, "tokens": 40.0}, {"ttft_ms": [12.0, 12.345678, 15.0]}).table())
    assert text.splitlines() == [
        "figure   value  samples",
        "ttft_ms  12.35  12 to 15 of 3",
        "tokens      40",
    ]


def test_numbers_for_a_person():
    assert [figure(x) for x in (98362432, 1234.56, 0.000123456, math.nan, -math.inf, 0)] == [
        "98,362,432",
        "1,234.6",
        "0.0001235",
        "nan",
        "-inf",
        "0",
    ]


def test_html_is_escaped_and_has_no_colour_of_its_own():
    """A fixed background is a glaring block in a dark theme, a fixed text colour is unreadable in one of the two."""
    html = Table(("name",), [("<script>",)])._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "background:transparent" in html
    assert "color:inherit" in html
