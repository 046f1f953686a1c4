"""The parameters of a notebook, seen from outside: its `parameters` cell and the dataclass behind it.

The cell is read with papermill's own inspection, so that what nanokit accepts is what any papermill run would
see. Which dataclass stands behind a notebook is said by the notebook itself, in its metadata:

    "nanokit": {"params": "nanokit.lab.experiments.tour:TourParams"}

The module may lie beside the notebook, where its kernel finds it too. A table in this package was rejected: a
reader's own notebook could not join it. A notebook without that key runs as well; its parameters then have the
types of the cell (annotation, or the default's), but neither ranges nor choices.
"""

import ast
import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import nbformat

from nanokit.errors import NotebookRunError, ParameterError
from nanokit.lab.params import Params, Value, unknown_parameter
from nanokit.lab.values import TYPE_NAMES, closest, literal, parse_value, type_name_of
from nanokit.paths import notebooks_dir


@dataclass(frozen=True)
class CellParameter:
    """One line of the cell. type_name: one of `values.TYPE_NAMES`; default: the literal's value."""

    name: str
    type_name: str
    default: Value
    help: str


def read_notebook(path: Path) -> nbformat.NotebookNode:
    """The notebook as format 4. Raises NotebookRunError when it is missing or not a notebook."""
    try:
        return nbformat.read(path, as_version=4)
    except (OSError, UnicodeDecodeError, nbformat.reader.NotJSONError, nbformat.ValidationError) as error:
        raise NotebookRunError(
            f"{path.name} cannot be read as a notebook",
            found=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}",
            needed="a Jupyter notebook (.ipynb, format 4)",
        ) from error


def content_hash(nb: nbformat.NotebookNode) -> str:
    """SHA-256 of the code cells' sources: outputs, texts and counts do not change what a run measures."""
    digest = hashlib.sha256()
    for cell in nb.cells:
        if cell.cell_type == "code":
            digest.update(cell.source.encode() + b"\0")
    return digest.hexdigest()


def read_cell(nb: nbformat.NotebookNode) -> dict[str, CellParameter]:
    """The parameters of the cell tagged `parameters`, {} without such a cell.

    Raises NotebookRunError when a line is beyond papermill's parser (it would be silently left out of the
    help and refused as unknown), is no literal, or has another type than the six.
    """
    from papermill.inspection import inspect_notebook

    tagged = [cell for cell in nb.cells if "parameters" in cell.metadata.get("tags", [])]
    if not tagged:
        return {}
    if len(tagged) > 1:
        raise NotebookRunError("more than one cell is tagged `parameters`", found=len(tagged), needed="one")
    seen = {name: _parameter(facts) for name, facts in inspect_notebook(nb).items()}
    try:
        written = _assigned(tagged[0].source)
    except SyntaxError as error:
        raise NotebookRunError("the parameters cell is not Python", found=str(error)) from error
    for name in written:
        if name not in seen:
            raise _unreadable(name, "papermill's parser skips this line")
    return seen


def _assigned(source: str) -> list[str]:
    """The names that the cell binds."""
    return [
        node.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]


def _parameter(facts: Mapping[str, str]) -> CellParameter:
    name, annotation = facts["name"], facts["inferred_type_name"].replace(" ", "")
    try:
        default = ast.literal_eval(facts["default"])
    except (ValueError, SyntaxError):
        raise _unreadable(name, f"`{facts['default']}` is no literal") from None
    type_name = type_name_of(default) if annotation == "None" else annotation
    if type_name not in TYPE_NAMES:
        raise _unreadable(name, f"type {type_name or type(default).__name__}")
    return CellParameter(name, type_name, default, facts["help"])


def _unreadable(name: str, found: str) -> NotebookRunError:
    return NotebookRunError(
        f"the parameters cell cannot be read at {name!r}",
        found=found,
        needed=f"`name: type = literal  # help`, one a line, no `#` or `=` in texts; {', '.join(TYPE_NAMES)}",
    )


def params_class(nb: nbformat.NotebookNode, folder: Path) -> type[Params] | None:
    """The dataclass that the notebook's metadata names, None when it names none. folder: the notebook's.

    Raises NotebookRunError when it cannot be imported or is no Params.
    """
    where = nb.metadata.get("nanokit", {}).get("params")
    if where is None:
        return None
    module, _, name = str(where).partition(":")
    # A module beside the notebook is read anew and not kept: another notebook's may have the same name.
    beside = (folder / f"{module}.py").is_file()
    known = sys.modules.pop(module, None) if beside else None
    sys.path.insert(0, str(folder))
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise NotebookRunError(
            "the notebook's parameters class cannot be imported", found=f"{where} ({error})"
        ) from error
    finally:
        sys.path.remove(str(folder))
        if beside:
            sys.modules.pop(module, None)
        if known is not None:
            sys.modules[module] = known
    if not (isinstance(found, type) and issubclass(found, Params)):
        raise NotebookRunError("the notebook's parameters class is no Params", found=where)
    return found


def differences(nb: nbformat.NotebookNode, cls: type[Params]) -> list[str]:
    """What the parameters cell says differently from the dataclass: names, order, types, defaults, help.

    Empty when they agree. The cure is to paste `cls.parameter_lines()` into the cell.
    """
    cell, found = read_cell(nb), []
    if list(cell) != list(cls.KNOBS):
        found.append(f"names: the cell has {list(cell)}, {cls.__name__} has {list(cls.KNOBS)}")
    for name, line in cell.items():
        knob = cls.KNOBS.get(name)
        if knob is None:
            continue
        for what, theirs, ours in (
            ("type", line.type_name, knob.type_name),
            ("default", literal(line.default), literal(knob.default)),
            ("help", line.help, knob.comment),
        ):
            if theirs != ours:
                found.append(f"{name}: the cell's {what} is {theirs}, {cls.__name__}'s is {ours}")
    return found


@dataclass(frozen=True)
class Resolved:
    """injected: what goes into the notebook, as given. full: every parameter's value, for the record.

    declared: a dataclass stands behind the notebook, so that full is what its Result must have been measured
    with.
    """

    injected: dict[str, Value]
    full: dict[str, Value]
    declared: bool


def resolve(nb: nbformat.NotebookNode, given: Mapping[str, str | Value], folder: Path) -> Resolved:
    """Type and check the parameters of a run.

    given: by name; a str is read as text of a command line, anything else is a value. folder: the notebook's.
    Raises ParameterError for an unknown name (with the closest known one), a wrong type, a value out of
    range; NotebookRunError when the cell cannot be read or contradicts the dataclass in its names.
    """
    cell, cls = read_cell(nb), params_class(nb, folder)
    for name in given:
        if name not in cell:
            raise unknown_parameter(name, cell)
    types = {name: line.type_name for name, line in cell.items()}
    values: dict[str, Any] = {
        name: parse_value(name, types[name], value) if isinstance(value, str) else value
        for name, value in given.items()
    }
    defaults = {name: line.default for name, line in cell.items()}
    if cls is None:
        for name, value in values.items():
            _check_type(name, types[name], value)
        return Resolved(values, {**defaults, **values}, declared=False)
    if set(cls.KNOBS) != set(cell):
        raise NotebookRunError("the parameters cell and its class differ", found="; ".join(differences(nb, cls)))
    return Resolved(values, cls.from_mapping({**defaults, **values}).to_dict(), declared=True)


def _check_type(name: str, type_name: str, value: Any) -> None:
    same = type_name_of(value) in (type_name, "int" if type_name == "float" else type_name)
    if not same and not (value == [] and type_name.startswith("list")):
        raise ParameterError(
            f"parameter {name!r} has the wrong type",
            found=f"{value!r} ({type(value).__name__})",
            needed=f"{type_name}: {TYPE_NAMES[type_name]}",
        )


def find_notebook(name: str) -> Path:
    """A path to an .ipynb, or the name of a shipped notebook: "00_tour", "tour" or "00".

    Raises NotebookRunError naming the closest one when there is none, or when more than one fits.
    """
    path = Path(name).expanduser()
    if path.suffix == ".ipynb" and path.is_file():
        return path.resolve()
    shipped = sorted(notebooks_dir().glob("*.ipynb"))
    wanted = path.name.removesuffix(".ipynb")
    matches = [p for p in shipped if wanted in (p.stem, *p.stem.split("_", 1))]
    if len(matches) == 1 and path.name == name:
        return matches[0]
    stems = [p.stem for p in shipped]
    best = closest(wanted, [*stems, *(stem.split("_", 1)[-1] for stem in stems)])
    raise NotebookRunError(
        f"{name!r} fits more than one notebook" if len(matches) > 1 else f"no notebook {name!r}",
        found=", ".join(p.stem for p in matches) or None,
        needed=f"a path to an .ipynb, or one of {', '.join(stems) or '(none are shipped)'}",
        do=f"did you mean {best!r}?" if best else None,
    )
