"""The figure of one matrix alone: bytes of weights a second, by one row, by several, and by bare reading."""

import plotly.graph_objects as go

from nanokit.lab.plots.house import bars, with_remark
from nanokit.lab.result import Result


def product(result: Result) -> go.Figure:
    """GB/s of weights, median with the range of the repeats."""
    m, s, p = result.metrics, result.samples, result.params.to_dict()
    rows = "1 row" if p["rows"] == 1 else f"{p['rows']} rows"
    finding = (
        f"One row uses {m['one_row_share']:.0%} of the speed of reading;<br>"
        f"{rows} take {m['v_ratio']:.2f} times as long, at {m['rows_gop_per_s']:.0f}e9 operations a second"
    )
    series = {
        "limit: reading alone": s["stream_gb_s"],
        "decode: 1 row": s["one_row_gb_s"],
        f"verification: {rows}": s["rows_gb_s"],
    }
    unit = f"weights, {p['weights']} x {p['activations']}, {m['walk_bytes'] / 2**20:.0f} MiB (GB/s)"
    return bars(with_remark(finding, result.remarks), series, unit=unit)
