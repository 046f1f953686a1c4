"""The kernels notebook: arithmetic by hand, what counts as equal, and that it runs with a backend missing."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import compiled_model, save_tiny_gguf

from nanokit.errors import ParameterError
from nanokit.kernels import reference
from nanokit.kernels.cpu import NoKernelsError
from nanokit.lab import lock, plots, sides
from nanokit.lab.experiments import rounding as rounding_module
from nanokit.lab.experiments import worked_product as by_hand
from nanokit.lab.experiments.backends import BackendsParams, backends
from nanokit.lab.experiments.gains import gains
from nanokit.lab.experiments.kernel_params import KINDS, KernelsParams, opened
from nanokit.lab.experiments.packing import packing
from nanokit.lab.experiments.promises import promises
from nanokit.lab.experiments.rounding import rounding
from nanokit.lab.oracle import FORMATS, bound, matrix, same_codes
from nanokit.lab.progress import StoppedError
from nanokit.lab.repeat import comparable
from nanokit.lab.result import together
from nanokit.paths import data_dir


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("kernels")
    yield str(save_tiny_gguf(folder / "tiny.gguf", compiled_model("llama"), types="Q4_1"))
    opened.cache_clear()


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "lock_path", lambda: tmp_path / "measuring.lock")


def params(tiny: str, **changes: object) -> KernelsParams:
    small: dict[str, object] = {
        "preset": "smoke", "model": tiny, "weights": ["int4-asym-g32"], "columns": [64], "modes": ["a8g32", "token"],
        "products": ["up"], "rows": [1, 3], "text_tokens": 12,
    }  # fmt: skip
    return KernelsParams.from_mapping(small | changes)


floats = st.floats(-(2.0**40), 2.0**40, width=32)


@given(floats, floats, floats)
@settings(max_examples=200)
def test_fma_rounds_once_to_the_nearest(a: float, b: float, c: float) -> None:
    """By way of fp64 it would round twice, and the exercise would call a right answer wrong."""
    got = by_hand.fma(np.float32(a), np.float32(b), np.float32(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    for other in (np.nextafter(got, np.float32(-np.inf)), np.nextafter(got, np.float32(np.inf))):
        assert abs(Fraction(float(got)) - exact) <= abs(Fraction(float(other)) - exact)


def test_fma_is_not_that_of_fp64() -> None:
    """a * b + c lies 2^-70 below the middle of two fp32 numbers: fp64 rounds it to the middle, and fp32 then up."""
    a, b, c = np.float32(2.0**-12 * (1 + 2.0**-23)), np.float32(2.0**-12 * (1 - 2.0**-23)), np.float32(1 + 2.0**-23)
    assert np.float32(float(a) * float(b) + float(c)) > c
    assert by_hand.fma(a, b, c) == c


@pytest.mark.parametrize("name", FORMATS[:4])
def test_the_example_is_what_the_backends_compute(name: str) -> None:
    """A hand that rounds elsewhere would teach another contract than the kernels keep."""
    result = by_hand.worked_product(KernelsParams(example=name))
    assert set(result.said) == {"reference", "C", "Triton"} - set(sides.missing())
    for side in set(result.said) - {"reference"}:
        assert np.array_equal(result.said[side], result.by_hand)
    assert result.within_bound
    assert not replace(result, said={"C": result.by_hand + np.float32(0.01)}).within_bound
    assert len(result.arithmetic().rows) == 4
    assert "every bit" in str(result.answers())


def test_the_bound_is_narrower_than_one_code() -> None:
    """Else the notebook's dots would lie near zero whatever a backend computed."""
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    for name in FORMATS:
        weights = matrix(name, 5, 64)
        exact, allowed = bound(weights, x, "a8g32")
        weights.codes[3, 7] ^= 1
        changed, _ = bound(weights, x, "a8g32")
        assert ((changed - exact).abs()[:, 3] > allowed[:, 3]).all()


def test_codes_that_differ_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equality of scales has to see through their number: a backend may keep one of a row for every group."""
    side = sides.sides(matrix("int4-sym-g32", 16, 64))[-1]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    for mode in ("a16", "a8g32", "a8g16", "token", "tensor"):
        assert same_codes(side, x, mode)
    assert same_codes(side, x, "static", 2.0)
    codes, scales = side.codes(x, "a8g32")
    for changed in ((codes + (codes == codes.max()), scales), (codes, scales.nextafter(torch.tensor(9.0)))):
        monkeypatch.setattr(side, "codes", lambda *_, answer=changed: answer)
        assert not same_codes(side, x, "a8g32")


def test_promises_are_counted_and_broken_ones_too(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that never misses proves nothing: a row that changes in company has to show."""
    p = params(tiny, modes=["a8g32", "tensor", "static"])
    kept = promises(p)
    for name in set(kept.settings["backends"]) - {"reference"}:
        assert kept.metrics[f"codes_equal_{name}"] == kept.metrics["codes_equal_cases"] == 3
        assert kept.metrics[f"alone_equal_{name}"] == kept.metrics["alone_equal_cases"] == 2
        assert kept.metrics[f"weights_equal_{name}"] == kept.metrics["weights_equal_cases"] == 1
    assert all(0 < max(errors) < 1 for errors in kept.samples.values())
    if "Triton" in kept.settings["backends"] and "C" in kept.settings["backends"]:
        assert kept.between().rows == [("1", "3 of 3")]
    if "C" not in kept.settings["backends"]:
        pytest.skip("no C kernels here")
    right = sides.Compiled.multiply
    monkeypatch.setattr(
        sides.Compiled, "multiply", lambda self, x, mode, peak=None: right(self, x, mode, peak) * (1 + 1e-6 * len(x))
    )
    broken = promises(p)
    assert broken.metrics["alone_equal_C"] == 0
    assert max(broken.samples["error_of_bound_C_int4-asym-g32"]) > max(kept.samples["error_of_bound_C_int4-asym-g32"])


def test_a_promise_that_no_case_asks_for_is_none_of_none(tiny: str) -> None:
    """Mode tensor promises nothing of a row alone: with nothing else asked, the table had no number for it."""
    found = promises(params(tiny, modes=["tensor"], columns=[96]))
    assert any("0 of 0" in row for row in found.table().rows)
    assert found.metrics["reference_alone_share"] == 0


def test_packing_counts_what_is_there(tiny: str) -> None:
    """Bytes that were rounded up belong to the packed form, and no weight may be lost on the way."""
    result = packing(params(tiny))
    m, (source, weights) = result.metrics, opened(tiny)
    layers = [layer.up.weight for layer in weights.layers]
    assert m["weights_of_up"] == sum(each.shape[0] * each.shape[1] for each in layers)
    assert m["file_bytes_of_up"] == sum(source.stored[each.name].nbytes for each in layers)
    assert m["codes_bytes_of_up"] + m["scales_bytes_of_up"] + m["minimums_bytes_of_up"] == m["file_bytes_of_up"]
    for name in result.settings["packed"]:
        assert m[f"{name.lower()}_bytes_of_up"] >= m["file_bytes_of_up"]
        assert m[f"{name.lower()}_rows_equal"] == m[f"{name.lower()}_rows_checked"] > 0
    assert m["weights"] == sum(m[f"weights_of_{kind}"] for kind in KINDS)
    assert len(result.table().rows) == len(KINDS) + 1


def test_noise_is_that_of_the_difference() -> None:
    """In fp64, the long way: y minus the product of the rounded input."""
    noise = torch.Generator().manual_seed(0)
    x, weight = torch.randn(9, 64, generator=noise), torch.randn(5, 64, generator=noise)
    y = x.double() @ weight.double().T
    rounded = reference.quantize(x, "token").dequantize().double()
    ratio = y.square().sum(1) / (y - rounded @ weight.double().T).square().sum(1)
    assert rounding_module._sqnr(weight, x, ["token"], 0.0)["token"] == pytest.approx(
        float((10 * ratio.log10()).median()), abs=1e-3
    )


def test_inputs_are_those_of_the_text_and_peaks_of_the_text_before(tiny: str) -> None:
    """Place and layer are counted in one number: an input of another place may well have the right shape."""
    source, weights = opened(tiny)
    length = 12
    inputs, peaks = rounding_module._inputs(source, weights, length)
    ids = source.tokenizer.encode((data_dir() / rounding_module.TEXT).read_text("utf-8"))[: 2 * length]
    first = weights.layers[0]
    seen = reference.rms_norm(weights.embedding.dense()[ids], first.attn_norm.dense(), source.config.rms_eps)
    place = rounding_module.PLACE
    for kind in ("q", "k", "v"):
        torch.testing.assert_close(inputs[place[kind]], seen[length:])
    assert float(peaks[0]) == pytest.approx(float(seen[:length].abs().max()))
    for layer, each in enumerate(weights.layers):
        gate, up = (
            torch.nn.functional.linear(inputs[4 * layer + place[kind]], matrix_.weight.dense())
            for kind, matrix_ in (("gate", each.gate), ("up", each.up))
        )
        torch.testing.assert_close(inputs[4 * layer + place["down"]], torch.nn.functional.silu(gate) * up)


def test_rounding_sees_every_product(tiny: str) -> None:
    """Finer scales leave less noise at every product; an input of another layer or place would not be this one's."""
    result = rounding(params(tiny, modes=["a16", "a8g32", "tensor"]))
    for kind in KINDS:
        fine, middle, coarse = (result.layers(kind, mode) for mode in ("a16", "a8g32", "tensor"))
        assert len(fine) == (1 if kind == "head" else 2)
        assert all(a > b + 20 for a, b in zip(fine, middle, strict=True))
        assert all(a > b for a, b in zip(middle, coarse, strict=True))
    assert len(result.table().rows) == 3


def test_times_are_of_the_backends_that_are_fast(tiny: str) -> None:
    """The interpreter's time beside a compiler's would be read as one."""
    result = gains(params(tiny))
    assert result.timed()[:2] == ["torch fp32", "reference"]
    fast = not result.settings["triton_interpreted"] and "Triton" not in result.settings["missing"]
    assert ("Triton" in result.timed()) == fast
    assert len(result.table().rows) == 2
    for rows in (1, 3):
        assert result.ms("reference", "up", rows) > 0


def test_a_backend_that_is_missing_is_named_and_missed(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a compiler or without Triton the notebook has to run, and to say so."""

    def none() -> None:
        raise NoKernelsError("no compiler was found")

    monkeypatch.setattr(sides, "_kernels", none)
    present = sides.missing
    monkeypatch.setattr(sides, "missing", lambda: present() | {"Triton": "no Triton"})
    for module in ("promises", "gains", "packing", "rounding", "backends"):
        monkeypatch.setattr(f"nanokit.lab.experiments.{module}.missing", sides.missing)
    p = params(tiny)
    assert [side.name for side in sides.sides(matrix("int4-sym-g32", 2, 64))] == ["reference"]
    assert "C is missing here (no compiler was found)" in sides.where()
    assert promises(p).table().rows
    assert promises(p).between().rows == []
    assert "not here" in str(gains(p).table())
    assert packing(p).settings["packed"] == []
    assert rounding(p).table().rows[0][-1] == "-"
    result = backends(BackendsParams(preset="smoke", columns=64))
    assert [row[0] for row in result.table().rows] == ["reference"]
    for figure in (plots.gains(gains(p)), plots.promises(promises(p)), plots.backends(result)):
        assert figure.layout.title.text


def test_columns_that_are_no_units_are_refused() -> None:
    for made in (lambda: KernelsParams(columns=[64, 50]), lambda: BackendsParams(columns=40)):
        with pytest.raises(ParameterError, match="multiple of 32"):
            made()


def test_what_does_not_depend_on_time_repeats(tiny: str) -> None:
    """A timing under a name that does not say so makes `nanokit run --from-record` fail."""
    p = params(tiny)

    def run() -> dict[str, object]:
        every = (by_hand.worked_product, promises, gains, packing, rounding)
        return comparable(together(*(each(p) for each in every)).to_record())

    first = run()
    assert first == run()
    assert {"metric sqnr_db_down_token", "metric file_bytes_of_up", "metric codes_equal_cases"} <= set(first)


def test_figures_state_what_was_measured(tiny: str) -> None:
    """A title typed in, opaque numbers, an axis without a unit."""
    p = params(tiny)
    rounded, one = rounding(p), backends(BackendsParams(preset="smoke", columns=64, rows=2))
    worst = min(min(rounded.layers("down", mode)) for mode in p.modes)
    figures = [plots.promises(promises(p)), plots.gains(gains(p)), plots.rounding(rounded), plots.backends(one)]
    for figure in figures:
        assert "bdata" not in figure.to_json()
        assert "(" in figure.layout.xaxis.title.text + str(figure.layout.yaxis.title.text)
    assert f"{worst:.0f} dB" in figures[2].layout.title.text


def test_stop_is_heard(tiny: str) -> None:
    cancel = threading.Event()
    cancel.set()
    for experiment in (promises, gains, packing, rounding):
        with pytest.raises(StoppedError):
            experiment(params(tiny), cancel=cancel)
