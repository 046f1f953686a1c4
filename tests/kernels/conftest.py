"""The C library in each variant that this machine can run."""

from collections.abc import Iterator

import pytest

from nanokit.errors import ParameterError
from nanokit.kernels.cpu.compiler import VARIANTS, NoKernelsError
from nanokit.kernels.cpu.library import Library, library


@pytest.fixture(scope="module", params=list(VARIANTS))
def kernels(request: pytest.FixtureRequest) -> Iterator[Library]:
    """A library; the environment names its variant for as long as tests use it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOKIT_CPU_KERNELS", request.param)
        try:
            yield library()
        except (NoKernelsError, ParameterError) as error:
            pytest.skip(str(error))
