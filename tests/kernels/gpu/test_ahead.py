"""Compile-only mode, in processes of its own: TRITON_INTERPRET decides when Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanokit.errors import ParameterError
from nanokit.kernels.gpu import ahead, runtime

SCRIPT = """
import torch
import triton
import triton.language as tl

from nanokit.errors import ParameterError
from nanokit.kernels.gpu import ahead, runtime
from nanokit.kernels.gpu.fake_quant import fake_quantize
from nanokit.quant.integer import integer_format


@triton.jit
def double(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n, other=0.0) * 2 + 1, mask=i < n)


@triton.jit
def products(x_ptr, out_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i, j = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + i[:, None] * COLUMNS + j[None, :])
    tl.store(out_ptr + i[:, None] * ROWS + i[None, :], tl.dot(x, tl.trans(x), out_dtype=tl.float32))


@triton.jit
def below_peak(x_ptr, out_ptr, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.max(x, axis=0) - x)


@triton.jit
def wrong(x_ptr):
    tl.dot(tl.load(x_ptr + tl.arange(0, 16)), 1)


def refused(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


x, out = torch.zeros(1 << 16), torch.full((1 << 16,), 7.0)
half = torch.zeros(1 << 16, dtype=torch.float16)
for arch in (80, 90):
    with ahead.compiling(arch) as reports:
        assert runtime.device() == torch.device("cpu")
        w = torch.randn(8, 192, requires_grad=True)
        for _ in range(2):  # the second time is no other kernel
            fake_quantize(w, integer_format("int4-asym-g96")).sum().backward()
        assert [r.kernel for r in reports] == ["quantize", "pass_through"], reports
        for report in reports:
            assert report.arch == arch and report.widest_load == 16 and report.stack == 0 and report.mma is None, report
            assert 16 <= report.registers <= 128 and report.ptx > 1000, report
        assert reports[0].constants["GROUP"] == 96 and reports[0].constants["TRAINING"] is True

        runtime.launch(double, (4,), x, out, 4096, 1024)
        runtime.launch(double, (4,), x[1:], out, 4096, 1024)  # begins between two wide loads
        runtime.launch(double, (4,), x, out, 4095, 1024)  # so many that a mask may cut one
        runtime.launch(double, (4,), x, out, 4096, 1024, warps=8)
        aligned, shifted, odd, more = reports[2:]
        assert aligned.loads == {16: 2} and shifted.loads == {4: 8} and odd.loads == {4: 8}, reports[2:]
        assert (aligned.warps, more.warps, more.loads) == (4, 8, {16: 1})

        runtime.launch(products, (1,), half, out, 64, 64)
        assert reports[-1].mma == {80: "mma.sync", 90: "wgmma"}[arch] and reports[-1].shared >= 64 * 64 * 2, reports[-1]
        runtime.launch(below_peak, (1,), x, out, 1 << 13, warps=1)
        assert reports[-1].stack > 0, reports[-1]  # 256 numbers a thread

        known = len(reports)
        text = refused(ahead.CannotRunError, lambda: runtime.launch(double, (1, 70000), x, out, 9, 1024))
        assert "(1, 70000)" in text, text
        assert "(0,)" in refused(ahead.CannotRunError, lambda: runtime.launch(double, (0,), x, out, 9, 1024))
        refused(triton.CompilationError, lambda: runtime.launch(wrong, (1,), x))
        refused(ParameterError, lambda: ahead.compiling(90).__enter__())
        assert len(reports) == known

with ahead.compiling(86) as reports:  # the same kernel fits where there is more shared memory
    text = refused(ahead.CannotRunError, lambda: runtime.launch(products, (1,), half, out, 16, 4096))
    assert "products needs more shared memory than sm_86 has" in text and "at most 101376" in text, text
with ahead.compiling(90) as reports:
    runtime.launch(products, (1,), half, out, 16, 4096)
    assert 101376 < reports[0].shared <= 232448, reports
assert runtime.instead_of_running is None and out.eq(7).all()
print("done")
"""


def test_kernels_compile_for_gpus_that_are_not_there(tmp_path: Path) -> None:
    """Fake quantization and four kernels of the test: what the reports say is what the code does, wide loads
    are lost with alignment, and what a GPU would refuse is refused."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_what_cannot_be_compiled_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture by its choices, a process that interprets by what to do."""
    with pytest.raises(ParameterError, match=r"found: 91\n  needed: one of 80"), ahead.compiling(91):
        pass
    monkeypatch.setattr(runtime, "INTERPRETED", True)
    with pytest.raises(ParameterError, match="set TRITON_INTERPRET=0"), ahead.compiling(90):
        pass
