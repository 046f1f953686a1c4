"""Loads of one width: each reads what it says, and nothing else."""

import numpy as np
import pytest

from nanokit.errors import ParameterError
from nanokit.kernels.cpu.align import WIDTHS, Loads


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("offset", [0, 1, 4, 20, 63])
def test_a_read_covers_its_bytes(width: int, offset: int) -> None:
    """A loop that stops early, or reads one address again and again, is as fast as one likes."""
    loads = Loads()
    if width not in loads.widths:
        pytest.skip(f"this build has no loads of {width} bytes")
    data = np.random.default_rng(1).integers(0, 256, 8 * 64 * 5 + 64, dtype=np.uint8)[offset:][: 8 * 64 * 5]
    expected = int(np.bitwise_xor.reduce(np.frombuffer(data.tobytes(), np.uint64)))
    assert loads.read(data, width) == expected
    assert loads.read(data, width, passes=3) == expected
    assert loads.read(data, width, passes=2) == 0
    changed = data.copy()
    changed[-1] ^= 1
    assert loads.read(changed, width) != expected


def test_what_cannot_be_read_is_refused() -> None:
    """A width without a load of its own would be timed as two; strided bytes would be read as the ones between."""
    loads, data = Loads(), np.zeros(4096, np.uint8)
    with pytest.raises(ParameterError, match="not a width"):
        loads.read(data, 8)
    with pytest.raises(ParameterError, match="in one piece"):
        loads.read(data[::2], loads.widths[0])
    with pytest.raises(ParameterError, match="in one piece"):
        loads.read(data.view(np.float32), loads.widths[0])
