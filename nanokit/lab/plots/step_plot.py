"""The figure of one forward under sliders: one row, several rows, and the bare reading of the weights."""

import plotly.graph_objects as go

from nanokit.lab.plots.house import bars, with_remark
from nanokit.lab.result import Result


def step_cost(result: Result) -> go.Figure:
    """Milliseconds of a forward, median with the range of the repeats."""
    m, s, p = result.metrics, result.samples, result.params.to_dict()
    rows = "1 row" if p["rows"] == 1 else f"{p['rows']} rows"
    finding = (
        f"{rows} cost {m['v_ratio']:.2f} times one: {m['row_tok_per_s']:.0f} tokens a second;<br>"
        f"one row is at {m['one_row_share']:.0%} of the streaming limit"
    )
    series = {
        f"verification: {rows}": s["rows_ms"],
        "decode: 1 row": s["one_row_ms"],
        f"limit: reading {m['bytes_per_token'] / 1e6:.0f} MB": s["stream_ms"],
    }
    unit = f"time of a forward, {p['activations']}, {p['kv_format']} pages, context {p['ctx']} (ms)"
    return bars(with_remark(finding, result.remarks), series, unit=unit, digits=2)
