"""The check's findings as plain text: what is wrong first, then a table a subject."""

from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Sequence[str]]


def text(made: Mapping[str, Any]) -> str:
    """The document of program.py as text."""
    parts = []
    if made["faults"]:
        parts.append("\n".join(["WRONG", *(f"  {line}" for line in made["faults"])]))
    parts += [
        _table("cases", ("operation", "cases", "wrong", "nearest to its bound"), _cases(made["correctness"])),
        _table("speed (ms: median)", ("operation", "what", "ms", "host us", "GB/s", "of copy", "vs bf16"),
               [_speed(each) for each in made["speed"]]),
        _table("base offsets of packed codes", ("bytes", "equal", "GB/s", "relative", "copy", "relative", "loads"),
               [_offset(each) for each in made["offsets"]]),
        _table("configurations", ("format", "rows", "best", "ms", "default ms", "same bits"),
               [_tuned(each) for each in made["tuned"]]),
        _table("compiled", ("kernel", "sm", "warps", "registers", "stack", "shared", "loads", "mma", "constants"),
               [_compiled(each) for each in made["compiled"]]),
    ]  # fmt: skip
    if made["skipped"]:
        parts.append("\n".join([f"skipped, the time was over: {len(made['skipped'])}",
                                *(f"  {name}" for name in made["skipped"])]))  # fmt: skip
    parts += [f"note: {remark}" for remark in made["remarks"]]
    if made["timings"] == "interpreter":
        parts.append("note: kernels were interpreted: times say nothing about a GPU")
    cut = made["skipped"] or made["interrupted"]
    verdict = "WRONG" if made["faults"] else "all right as far as it went" if cut else "all right"
    if made["interrupted"]:
        parts.append("note: interrupted; what came after is neither here nor listed as skipped")
    parts.append(f"{verdict}, {made['duration_s']:.0f} s, {made['mode']}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(title: str, columns: Sequence[str], rows: Rows) -> str:
    if not rows:
        return ""
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    body = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
    return "\n".join([title, *(f"  {line}" for line in body)])


def _cases(outcomes: Sequence[Mapping[str, Any]]) -> Rows:
    rows = []
    for op in dict.fromkeys(each["op"] for each in outcomes):
        those = [each for each in outcomes if each["op"] == op]
        measured = [each for each in those if each["bound"] and isinstance(each["error"], float)]
        nearest = max(measured, key=lambda each: each["error"] / each["bound"], default=None)
        told = (
            "bits equal" if nearest is None else f"{nearest['error'] / nearest['bound']:.3f} of it: {nearest['case']}"
        )
        rows.append((op, str(len(those)), str(sum(not each["ok"] for each in those)), told))
    return rows


def _speed(each: Mapping[str, Any]) -> Sequence[str]:
    numbers = each["ms"]["median"], each["host_us"], each["gb_s"], each.get("share_of_copy"), each.get("vs_bf16")
    shown = (_number(x, form) for x, form in zip(numbers, (".4f", ".0f", ".0f", ".2f", ".2f"), strict=True))
    return (each["op"], each["name"], *shown)


def _offset(each: Mapping[str, Any]) -> Sequence[str]:
    numbers = (
        (each["gb_s"], ".0f"),
        (each["relative"], ".3f"),
        (each["copy_gb_s"], ".0f"),
        (each["copy_relative"], ".3f"),
    )
    return (str(each["offset"]), _yes(each["equal"]), *(_number(*pair) for pair in numbers), _loads(each["loads"]))


def _tuned(each: Mapping[str, Any]) -> Sequence[str]:
    times = _number(each["ms"], ".4f"), _number(each["default_ms"], ".4f")
    rows = "more" if each["rows"] > 1 << 20 else str(each["rows"])
    return (each["format"], rows, "/".join(map(str, each["config"])), *times, _yes(each["equal"]))


def _compiled(each: Mapping[str, Any]) -> Sequence[str]:
    constants = " ".join(f"{name}={value}" for name, value in each["constants"].items() if name != "LOOKUP")
    numbers = (str(each[name]) for name in ("arch", "warps", "registers", "stack", "shared"))
    return (each["kernel"], *numbers, _loads(each["loads"]), each["mma"] or "", constants)


def _loads(loads: Mapping[int, int] | None) -> str:
    """Bytes of a load x instructions that load so many."""
    return " ".join(f"{size}Bx{count}" for size, count in loads.items()) if loads else ""


def _number(value: float | str | None, form: str) -> str:
    return "" if value is None else value if isinstance(value, str) else format(value, form)


def _yes(value: bool) -> str:
    return "yes" if value else "NO"
