"""Static INT8 as onnxruntime has it, beside the kit's simulation of it. Needs the extra `oracle` (onnx, onnxruntime).

What is the same: the grid of activations, their codes, and weights of eight bits. What is not, and is stated here so
that it cannot change unseen: onnxruntime's reduced weights use -64 … 64, ours the seven bits' own -63 … 63; scales of
weights have eleven bits here and 24 there; its bias is rounded to int32. Its graphs run without optimizations, as they
are written: fused integer kernels saturate on some processors, which is the reason for a reduced range and no subject
of a test of arithmetic.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nanokit.quant.affine import AffineRanges
from nanokit.quant.weight_format import weight_format

onnx = pytest.importorskip("onnx", reason="needs the extra oracle: pip install nanokit[oracle]")
ort = pytest.importorskip("onnxruntime", reason="needs the extra oracle: pip install nanokit[oracle]")
rounding = pytest.importorskip("onnxruntime.quantization", reason="needs the extra oracle: pip install nanokit[oracle]")

COLUMNS, ROWS = 96, 64


def session(model: Any) -> Any:
    """It runs what stands in the graph, on one thread."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def graph(nodes: list, shapes: dict[str, tuple[str, list]], outputs: set[str], constants: dict[str, np.ndarray]) -> Any:
    """Number type and shape of each input and output by its name."""
    ends = {
        name: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DataType.Value(kind), shape)
        for name, (kind, shape) in shapes.items()
    }
    made = onnx.helper.make_graph(
        nodes, "g", [ends[name] for name in ends if name not in outputs], [ends[name] for name in outputs],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )  # fmt: skip
    return onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def quantize_linear() -> Any:
    """QuantizeLinear and back, scale and zero point as inputs."""
    shapes = {"x": ("FLOAT", [None]), "scale": ("FLOAT", []), "zero": ("UINT8", []), "y": ("FLOAT", [None])}
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["codes"]),
        onnx.helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["y"]),
    ]
    return session(graph(nodes, shapes, {"y"}, {}))


@given(st.floats(-1e4, 1e4, width=32), st.floats(-1e4, 1e4, width=32), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_rounded_is_quantize_linear(quantize_linear: Any, one: float, other: float, seed: int) -> None:
    """The operator that exported models hold, on the range that calibration saw, inputs far beyond it among them. All
    bits are the same but where an input is half way between two codes to fp32's accuracy: torch multiplies by the
    inverse of the scale, and may take the other of the two."""
    ranges = AffineRanges()
    ranges.observe("x", torch.tensor([one, other]))
    scale, zero = ranges.grid("x")
    if scale < 1e-30:
        return
    low, high = min(0.0, one, other), max(0.0, one, other)
    ends = np.float32(low), np.float32(high), np.uint8(0), np.uint8(255)
    their_zero, their_scale = rounding.quant_utils.compute_scale_zp(*ends)
    assert float(their_scale) == pytest.approx(scale, rel=1e-6)  # some versions subtract the ends in fp32
    assert zero == their_zero or abs(abs(-low / scale % 1) - 0.5) < 1e-4
    span = high - low or 1.0
    x = np.random.default_rng(seed).uniform(low - span, high + span, 512).astype(np.float32)
    x[:3] = 0, one, other
    inputs = {"x": x, "scale": np.array(scale, np.float32), "zero": np.array(zero, np.uint8)}
    theirs = quantize_linear.run(["y"], inputs)[0]
    ours = ranges.rounded("x", torch.from_numpy(x)).numpy()
    steps = x.astype(np.float64) / scale
    clear = np.abs(np.abs(steps - np.rint(steps)) - 0.5) > 1e-6 * np.maximum(1, np.abs(steps))
    assert clear.sum() > 500
    assert np.array_equal(ours[clear], theirs[clear])
    assert (np.abs(ours - theirs) <= 1.0001 * scale).all()


class Batches(rounding.CalibrationDataReader):
    """Rows of inputs, 16 at a time."""

    def __init__(self, text: np.ndarray) -> None:
        self._left = [text[first : first + 16] for first in range(0, len(text), 16)]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return {"x": self._left.pop(0)} if self._left else None


@pytest.fixture(scope="module")
def layer() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(COLUMNS, ROWS).requires_grad_(False)


def exported(layer: nn.Linear, text: np.ndarray, folder: Path, reduced: bool) -> Any:
    """The layer as onnxruntime's static quantization leaves it: per tensor, uint8 activations, int8 weights."""
    nodes = [onnx.helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)]
    shapes = {"x": ("FLOAT", [None, COLUMNS]), "y": ("FLOAT", [None, ROWS])}
    plain = graph(nodes, shapes, {"y"}, {"w": layer.weight.numpy(), "b": layer.bias.numpy()})
    rounding.quantize_static(
        plain, folder / "q.onnx", Batches(text), quant_format=rounding.QuantFormat.QDQ, per_channel=False,
        reduce_range=reduced, activation_type=rounding.QuantType.QUInt8, weight_type=rounding.QuantType.QInt8,
        calibrate_method=rounding.CalibrationMethod.MinMax,
        extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm"]},
    )  # fmt: skip
    return onnx.load(folder / "q.onnx")


def inputs(seed: int, rows: int, size: float = 1.0) -> np.ndarray:
    """Columns of unlike size, off zero: the grid needs its zero point."""
    rng = np.random.default_rng(seed)
    columns = np.exp(0.5 * np.random.default_rng(0).standard_normal(COLUMNS))
    return (size * columns * (rng.standard_normal((rows, COLUMNS)) + 0.3)).astype(np.float32)


def sqnr(exact: np.ndarray, found: np.ndarray) -> float:
    return float(10 * np.log10(np.square(exact, dtype=np.float64).sum() / np.square(found - exact).sum()))


@pytest.mark.parametrize("reduced", [False, True])
def test_a_layer_that_onnxruntime_quantized(layer: nn.Linear, reduced: bool, tmp_path: Path) -> None:
    """Calibrated on the same rows, run on rows of which some are clipped. With its own weights our activations give its
    outputs: to fp32's rounding, and half a step of its int32 bias. With ours the noise on inputs in range is its noise
    to .3 dB (reduced: ours has 63 codes for its 64, .14 dB)."""
    text, others = inputs(1, 64), inputs(2, 200, 1.4)
    model = exported(layer, text, tmp_path, reduced)
    kept = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    module = nn.Sequential(layer)
    ranges = AffineRanges()
    with ranges.observing(module):
        module(torch.from_numpy(text))
    scale, zero = ranges.grid("0")
    assert float(kept["x_scale"]) == pytest.approx(scale, rel=1e-6)
    assert 0 < zero == kept["x_zero_point"] < 255

    q = weight_format("int8-sym-tensor-reduced" if reduced else "int8-sym-tensor").quantize(layer.weight.numpy())
    assert np.abs(q.codes).max() == (63 if reduced else 127)
    assert np.abs(kept["w_quantized"]).max() == (64 if reduced else 127)
    assert kept["w_scale"] * (64 / 63 if reduced else 1) == pytest.approx(q.scales[0, 0], rel=2**-11)
    if not reduced:
        off = np.abs(q.codes.astype(int) - kept["w_quantized"])
        assert off.max() <= 1
        assert off.mean() < 0.03  # 127 codes from the middle, eleven bits are off by a 32nd of a step

    run = session(model)
    theirs = run.run(None, {"x": others})[0]
    weights = torch.from_numpy(kept["w_quantized"].astype(np.float32) * kept["w_scale"])
    simulated = nn.Sequential(nn.Linear(COLUMNS, ROWS))
    simulated.load_state_dict({"0.weight": weights, "0.bias": layer.bias})
    with torch.no_grad(), ranges.applied(simulated):
        ours = simulated(torch.from_numpy(others)).numpy()
    half = 0.5 * float(kept["b_quantized_scale"][0])
    assert np.abs(ours - theirs).max() < 1.01 * half + 1e-5
    with torch.no_grad():
        exact = simulated(torch.from_numpy(others)).numpy()
    assert np.abs(exact - theirs).max() > 20 * half  # clipped inputs

    simulated.load_state_dict({"0.weight": torch.from_numpy(q.dequantize()), "0.bias": layer.bias})
    with torch.no_grad(), ranges.applied(simulated):
        ours = simulated(torch.from_numpy(text)).numpy()
        plain = layer(torch.from_numpy(text)).numpy()
    noise = sqnr(plain, ours), sqnr(plain, run.run(None, {"x": text})[0])
    assert abs(noise[0] - noise[1]) < 0.3
