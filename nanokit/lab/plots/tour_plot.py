"""The tour's figure: what a token of the prompt and a token of the answer cost, and what memory alone would take."""

import statistics

import plotly.graph_objects as go

from nanokit.lab.plots.house import bars, with_remark
from nanokit.lab.result import Result


def tour(result: Result) -> go.Figure:
    """Milliseconds a token, median with the range of the repeats: prefill, decode, and what memory alone takes for the
    weights as they are computed with, and for the same weights in fp32."""
    m, s = result.metrics, result.samples
    stream_ms = [m["bytes_per_token"] / (speed * 1e9) * 1e3 for speed in s["stream_gb_s"]]
    fp32_ms = [m["fp32_bytes_per_token"] / (speed * 1e9) * 1e3 for speed in s["stream_gb_s"]]
    ratio = m["decode_ms_per_token"] / m["prefill_ms_per_token"]
    finding = (
        f"A token of the answer costs {ratio:.0f} times one of the prompt;<br>"
        f"reading the weights once is {statistics.median(stream_ms) / m['decode_ms_per_token']:.0%} of that"
    )
    series = {
        "prefill": [1e3 / speed for speed in s["prefill_tok_per_s"]],
        "decode": s["decode_ms_per_token"],
        f"limit: {m['bytes_per_token'] / 1e6:.0f} MB from memory": stream_ms,
        f"limit in fp32: {m['fp32_bytes_per_token'] / 1e6:.0f} MB": fp32_ms,
    }
    return bars(
        with_remark(finding, result.remarks),
        series,
        unit=f"time per token, prompts of {result.params.to_dict()['prompt_tokens']} tokens (ms)",
    )
