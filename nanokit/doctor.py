"""What this machine offers to nanokit, what is missing, and how to mend it in one line each.

`ok` needs nothing; `warn` costs speed or a convenience; `fail` means that some command of the kit does not
work here, and the exit code says so. Takes seconds, needs no network, and changes nothing unless asked to
mend.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass

from nanokit import checks
from nanokit.errors import NanokitError


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. found: what is there. mend: one line, empty when the status is ok."""

    name: str
    status: checks.Status
    found: str
    mend: str = ""


CHECKS: dict[str, Callable[[], checks.Verdict]] = {
    "Python": checks.python,
    "system": checks.system,
    "packages": checks.packages,
    "torch": checks.torch,
    "CPU": checks.cpu,
    "GPU": checks.gpu,
    "C compiler": checks.compiler,
    "browser": checks.browser,
    "model": checks.model,
    "Jupyter kernel": checks.kernel,
    "Lab settings": checks.overrides,
    "cache": checks.cache,
    "runs": checks.runs,
    "disk": checks.disk,
    "memory": checks.memory,
    "notebooks": checks.notebooks,
}


def run(mend: bool = False) -> list[Check]:
    """All checks, in order. A check that stumbles over a broken install is itself a finding, not a crash.

    mend: first write what the kit may write by itself, JupyterLab's settings overrides.
    """
    looks = CHECKS | {"Lab settings": checks.overrides_written} if mend else CHECKS
    found = []
    for name, look in looks.items():
        try:
            found.append(Check(name, *look()))
        except NanokitError as error:
            what = error.what if error.found is None else f"{error.what}: {error.found}"
            found.append(Check(name, "fail", what, error.do or "see what was found"))
        except (ImportError, OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
            first_line = f"{type(error).__name__}: {error}".split("\n")[0]
            reinstall = f"{sys.executable} -m pip install --force-reinstall NAME, the package that is named"
            found.append(Check(name, "fail", first_line, reinstall))
    return found


def exit_code(found: list[Check]) -> int:
    """1 if anything failed, else 0."""
    return int(any(check.status == "fail" for check in found))


def to_json(found: list[Check]) -> str:
    """A list of objects with the fields of `Check`."""
    return json.dumps([asdict(check) for check in found], indent=2, ensure_ascii=False)


def render(found: list[Check]) -> str:
    """Plain text: a row a check, the mend below it, the counts at the end."""
    width = max(len(check.name) for check in found)
    lines = []
    for check in found:
        lines.append(f"{check.status:<4}  {check.name:<{width}}  {check.found}")
        if check.mend:
            lines.append(f"{'':<4}  {'':<{width}}  mend: {check.mend}")
    counts = Counter(check.status for check in found)
    lines.append(", ".join(f"{counts[status]} {status}" for status in ("ok", "warn", "fail")))
    return "\n".join(lines)
