"""Benchmarks: `nanokit bench prefill | decode | batch | verify-cost`, and the same functions for a notebook.

    from nanokit import lab

    result = lab.decode(lab.DecodeParams(ctx=[64, 2048]))  # loads the model that the params name, or pass engine=
    result.metrics["tok_per_s"], result.metrics["share_of_limit"]

Everything that is compared is measured in turns within one run: a figure of one minute against a figure of another one
says more about the machine than about the code. `timing` takes turns, `workload` keeps an engine at a context length,
`limit` knows what memory allows, `peers` runs other programs on the same file, `schema` is the JSON of all kinds.
"""
