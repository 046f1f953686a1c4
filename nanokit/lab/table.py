"""A small table: aligned plain text for a terminal and a strict notebook test, HTML for light and dark
themes.

pandas was rejected for this: its HTML follows Jupyter's style sheet only in some front ends, its text repr
depends on the width of the terminal, and it costs half a second to import.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass

# Borders and header in a grey that has contrast on white and on near-black; text inherits the theme's colour.
_CELL = "padding:2px 12px;border-bottom:1px solid rgba(127,127,127,.35)"


@dataclass(frozen=True)
class Table:
    """columns: headers. rows: cells as text, as many as columns. right: the columns aligned right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[str] = ()

    def __str__(self) -> str:
        if not self.rows:
            return "(no rows)"
        lines = [[str(cell) for cell in row] for row in [self.columns, *self.rows]]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if column in self.right else cell.ljust(width)
                for cell, width, column in zip(line, widths, self.columns, strict=True)
            ).rstrip()
            for line in lines
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            return "".join(
                f'<{tag} style="{_CELL};text-align:{"right" if column in self.right else "left"}">'
                f"{html.escape(str(cell))}</{tag}>"
                for cell, column in zip(cells, self.columns, strict=True)
            )

        body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in self.rows)
        return (
            '<table style="border-collapse:collapse;color:inherit;background:transparent">'
            f"<thead><tr>{row(self.columns, 'th')}</tr></thead><tbody>{body}</tbody></table>"
        )
