"""Activation modes: codes and scales bit by bit against numpy, and whole models against transformers with the same
numpy rounding hung before its linear layers."""

from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays
from tiny import VOCAB, save_tiny, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from nanokit.errors import ParameterError
from nanokit.kernels import activations, reference
from nanokit.kernels.activations import quantize
from nanokit.kv.pages import PagedKV
from nanokit.model.batch import Batch
from nanokit.model.load import open_model
from nanokit.model.weights import find_weights

WHOLE = [mode for mode in activations.MODES if mode != "fp32"]


def expected(x: np.ndarray, mode: str, peak: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Codes [rows, cols] and scales [rows, groups] by the contract, an operation of fp32 at a time."""
    rows, cols = x.shape
    group = {"a16": 32, "a8g32": 32, "a8g16": 16}.get(mode, cols)
    limit = np.float32(32512 if mode == "a16" else 127)
    codes, scales = np.empty(x.shape, np.int32), np.empty((rows, cols // group), np.float32)
    for row in range(rows):
        for i in range(cols // group):
            part = x[row, i * group : (i + 1) * group]
            largest = np.abs(x if mode == "tensor" else part).max() if peak is None else np.float32(peak)
            zero = largest < 2.0**-100
            scales[row, i] = 0 if zero else largest / limit
            inverse = np.float32(0) if zero else limit / largest
            with np.errstate(over="ignore"):  # beyond a static peak
                codes[row, i * group : (i + 1) * group] = np.rint(part * inverse).clip(-limit, limit)
    return codes, scales


numbers = st.one_of(
    st.floats(-100, 100, width=32),
    st.integers(-254, 254).map(lambda i: i / 2),  # ties, where 127 is the peak
    st.sampled_from([0.0, -0.0, 127.0, 1e-45, 1e-38, -1e-30, 2.0**-100, 1e-25, 3e38, -3e38]),
)


@given(st.sampled_from(WHOLE), st.data())
@settings(max_examples=150, deadline=None)
def test_codes_and_scales_have_numpys_bits(mode: str, data: st.DataObject) -> None:
    """The C kernels are compared with this bit by bit; `127 / tensor` in torch, for one, rounds twice."""
    step = activations.GROUPS.get(mode, 1)
    shape = data.draw(st.integers(1, 4)), step * data.draw(st.integers(1, 4 if step > 1 else 70))
    x = data.draw(arrays(np.float32, shape, elements=numbers, fill=st.nothing()))
    peak = data.draw(st.sampled_from([0.0, 1e-20, 0.5, 63.0, 127.0, 3e38])) if mode == "static" else None
    q = quantize(torch.from_numpy(x), mode, peak)
    codes, scales = expected(x, mode, peak)
    assert q.codes.dtype == (torch.int32 if mode == "a16" else torch.int8)
    assert np.array_equal(q.codes.numpy(), codes)
    assert q.scales.dtype == torch.float32
    assert np.array_equal(q.scales.numpy(), scales)
    assert q.group * scales.shape[1] == shape[1]
    assert np.array_equal(q.dequantize().numpy(), codes.astype(np.float32) * np.repeat(scales, q.group, axis=1))


def test_two_planes_hold_every_code() -> None:
    """256 * high + low with both in eight signed bits: the high plane of 32,513 would not fit."""
    codes = torch.arange(-32512, 32513, dtype=torch.int32)
    high, low = activations.planes(codes)
    assert high.dtype == low.dtype == torch.int8
    assert torch.equal(256 * high.int() + low.int(), codes)


@pytest.mark.parametrize(("mode", "steps"), [("a16", 65024), ("a8g32", 254), ("a8g16", 254), ("token", 254)])
def test_the_error_is_the_stated_part_of_the_peak(mode: str, steps: int) -> None:
    x = torch.randn(40, 192, generator=torch.Generator().manual_seed(0)) * 10
    q = quantize(x, mode)
    peak = x.unflatten(1, (-1, q.group)).abs().amax(-1).repeat_interleave(q.group, 1)
    assert ((q.dequantize() - x).abs() <= peak / steps * 1.001 + x.abs() * 2.0**-22).all()


@pytest.mark.parametrize("mode", WHOLE)
def test_only_tensor_mode_looks_at_batch_mates(mode: str) -> None:
    """A row's result must not depend on its neighbours; `tensor` does by its nature, and says so."""
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    x[4, 9] = 50.0
    peak = 3.0 if mode == "static" else None
    alone = torch.cat([quantize(row[None], mode, peak).dequantize() for row in x])
    assert torch.equal(alone, quantize(x, mode, peak).dequantize()) == (mode != "tensor")


@pytest.mark.parametrize("mode", [mode for mode in WHOLE if mode != "static"])
def test_a_vanishing_peak_is_zero(mode: str) -> None:
    """32512 / 1e-35 is infinite, 1e-37 / 127 a denormal that C flushes to zero and torch does not."""
    for small in (1e-45, 1e-37, 1e-35, 2.0**-101):
        q = quantize(torch.tensor([[small, 0.0] * 16]), mode)
        assert not q.codes.any()
        assert not q.scales.any()
    least = torch.tensor([[2.0**-100, 0.0] * 16])
    assert torch.equal(quantize(least, mode).codes > 0, least > 0)


@pytest.mark.parametrize("mode", [mode for mode in WHOLE if mode != "static"])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_number_that_is_not_finite_is_not_hidden(mode: str, bad: float) -> None:
    """Codes cannot hold it. Were the scale zero or finite, a diverged row would become a plausible one."""
    x = torch.ones(2, 64)
    x[1, 5] = bad
    values = quantize(x, mode).dequantize()
    assert not values[1, :16].isfinite().any()
    assert values[0].isfinite().all() == (mode != "tensor")


@pytest.mark.parametrize(("mode", "columns"), [("a16", 48), ("a8g32", 48), ("a8g16", 24)])
def test_columns_that_do_not_divide_are_refused(mode: str, columns: int) -> None:
    with pytest.raises(ParameterError, match=f"(?s){mode}.*{columns} columns.*multiple of"):
        quantize(torch.ones(1, columns), mode)


# -- whole models -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, initializer_range=0.1, eos_token_id=258,
        bos_token_id=256, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.normal_(0.7, 0.2)
    return model, save_tiny(tmp_path_factory.mktemp("activations") / "m", model)


def bound(path: Path, mode: str) -> tuple[reference.Bound, PagedKV]:
    source = open_model(path)
    weights = find_weights(source.config, source)
    return reference.bind(source.config, weights, activations=mode), PagedKV(source.config, 1)


IDS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(3)).tolist()
BATCH = Batch(IDS, [40], [40], [[0]])


def places(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The linear layers at whose input a place is, in order; k and v, and up, share those of q and gate."""
    layers = [(x.self_attn.q_proj, x.self_attn.o_proj, x.mlp.gate_proj, x.mlp.down_proj) for x in model.model.layers]
    return [*(linear for four in layers for linear in four), model.lm_head]


def theirs(model: PreTrainedModel, change: Callable[[torch.nn.Module, np.ndarray], np.ndarray]) -> torch.Tensor:
    """Logits of transformers where `change` replaces the input of each linear layer."""

    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        return torch.from_numpy(change(module, inputs[0][0].numpy()))[None]

    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    handles = [linear.register_forward_pre_hook(hook) for linear in linears]
    try:
        with torch.inference_mode():
            return model(torch.tensor([IDS])).logits[0]
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("mode", WHOLE)
def test_a_model_sees_quantized_inputs_and_nothing_else_does(made: tuple[PreTrainedModel, Path], mode: str) -> None:
    """A layer left out, one quantized twice, or another place's peak: each changes the logits by more than the few
    codes that a difference of one ulp tips over."""
    model, path = made
    peaks: dict[torch.nn.Module, float] = {}

    def note(module: torch.nn.Module, x: np.ndarray) -> np.ndarray:
        peaks[module] = float(np.abs(x).max()) * 0.8  # so that static clips
        return x

    plain = theirs(model, note)
    for x in model.model.layers:
        peaks[x.self_attn.k_proj] = peaks[x.self_attn.v_proj] = peaks[x.self_attn.q_proj]
        peaks[x.mlp.up_proj] = peaks[x.mlp.gate_proj]

    def rounded(module: torch.nn.Module, x: np.ndarray) -> np.ndarray:
        codes, scales = expected(x, mode, peaks[module] if mode == "static" else None)
        return codes.astype(np.float32) * np.repeat(scales, x.shape[1] // scales.shape[1], axis=1)

    wanted = theirs(model, rounded)
    ours, pages = bound(path, mode)
    if mode == "static":
        ours.calibrate(torch.tensor([peaks[linear] for linear in places(model)]))
    with torch.inference_mode():
        hidden = ours.run(ours.plan(BATCH, pages))
        got = ours.logits(hidden)
        assert torch.equal(ours.argmax(hidden), got.argmax(-1))
        ids = torch.tensor([7, 300, 7])
        torch.testing.assert_close(ours.logits(hidden, ids), got[:, ids])
    effect, error = (plain - wanted).abs().mean(), (got - wanted).abs().mean()
    assert effect > 1e-5
    assert error < 0.2 * effect


def test_peaks_are_noted_where_they_belong(made: tuple[PreTrainedModel, Path]) -> None:
    """In fp32 and over several steps: peaks noted behind static clipping could only shrink from run to run."""
    model, path = made
    found: dict[torch.nn.Module, float] = {}

    def note(module: torch.nn.Module, x: np.ndarray) -> np.ndarray:
        found[module] = float(np.abs(x).max())
        return x

    theirs(model, note)
    ours, pages = bound(path, "static")
    peaks = activations.no_peaks(2)
    with torch.inference_mode():
        for start, end in ((0, 25), (25, 40)):
            hidden = ours.run(ours.plan(Batch(IDS[start:end], [end - start], [end], [[0]]), pages), peaks)
            activations.note_peak(peaks, 8, hidden)
    torch.testing.assert_close(peaks, torch.tensor([found[linear] for linear in places(model)]), rtol=1e-4, atol=0)
    ours.calibrate(peaks)
    assert ours.peaks is not None
    peaks.zero_()
    assert ours.peaks.all()


def test_static_before_calibration_and_bad_peaks_are_refused(made: tuple[PreTrainedModel, Path]) -> None:
    ours, pages = bound(made[1], "static")
    with pytest.raises(ParameterError, match=r"(?s)not been calibrated.*needed.*do: "):
        ours.run(ours.plan(BATCH, pages))
    with pytest.raises(ParameterError, match=r"(?s)shape \[8\].*\[9\]"):
        ours.calibrate(torch.ones(8))
    for place, value, named in ((6, 0.0, "layer 1, feed-forward input"), (8, torch.inf, "the head's input")):
        peaks = torch.ones(9)
        peaks[place] = value
        with pytest.raises(ParameterError, match=named):
            ours.calibrate(peaks)
    with pytest.raises(ParameterError, match="only static"):
        bound(made[1], "token")[0].calibrate(torch.ones(9))


def test_a_model_whose_columns_do_not_divide_is_refused_by_name(tmp_path: Path) -> None:
    """60 columns: token and tensor take them, groups do not. Found at bind, not in the middle of an answer."""
    path = save_tiny(tmp_path / "m", tiny_model("llama"))
    for mode in ("a16", "a8g32", "a8g16"):
        with pytest.raises(ParameterError, match=r"(?s)layers\.0\.self_attn\.q_proj\.weight.*60 columns"):
            bound(path, mode)
    ours, pages = bound(path, "token")
    assert ours.run(ours.plan(BATCH, pages)).isfinite().all()
    with pytest.raises(ParameterError, match="unknown activation mode"):
        bound(path, "a4")
