"""`python -m nanokit.kernels.gpu.check`: see checks/program.py, which is all of it.

To be run, and not to be imported: it would take the place of the function `nanokit.kernels.gpu.check`.
"""

import sys

from nanokit.kernels.gpu.checks.program import main

if __name__ == "__main__":
    sys.exit(main())
