"""A tiny notebook whose parameter k chooses how it behaves, and the dataclass behind it."""

from pathlib import Path

import nbformat

from nanokit.lab.cell import resolve

EXPERIMENT = """
from nanokit.lab.params import Params, experiment_params, knob

@experiment_params
class DemoParams(Params):
    k: int = knob(1, "what to do: 0 raises, 7 sleeps, 8 kills the kernel, else squares", low=0, high=9)
    name: str = knob("a", "who asks")
    depths: list[int] = knob([1, 3], "depths")
    size: int = knob(0, "size", low=1, high=9, by_preset={"smoke": 1, "quick": 2, "full": 3})
"""

CELLS = [
    "import os\nimport time\n\nimport demo_experiment\nfrom nanokit import lab\n"
    "p = demo_experiment.DemoParams.from_notebook(globals())\n"
    "os.environ.get('NANOKIT_HEADLESS'), os.path.basename(os.getcwd())",
    "import ipywidgets\nipywidgets.IntSlider(description='k')",
    "if p.k == 0:\n    raise ValueError('first line\\nk is zero in ' + os.getcwd())\n"
    "if p.k == 7:\n    time.sleep(60)\n"
    "if p.k == 8:\n    os._exit(9)",
    "metrics = {'square': p.k**2, 'ttft_ms': time.time() % 1e3, 'loss': float('nan')}\n"
    "result = lab.Result(p, metrics, {'steps': [1, 2], 'ttft_ms': [time.time()]}, texts={'answer': p.name})",
    "lab.record(result)",
]


def write_demo(folder: Path) -> Path:
    """Write the notebook and its module into folder; returns the notebook's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "demo_experiment.py").write_text(EXPERIMENT)
    space: dict = {"__name__": "demo_experiment"}
    exec(EXPERIMENT, space)
    v4 = nbformat.v4
    cells = [v4.new_markdown_cell("# Demo"), v4.new_code_cell(space["DemoParams"].parameter_lines())]
    cells[1].metadata["tags"] = ["parameters"]
    nb = v4.new_notebook(cells=cells + [v4.new_code_cell(source) for source in CELLS])
    nb.metadata["kernelspec"] = {"name": "a-private-kernel", "language": "python", "display_name": "Mine"}
    nb.metadata["nanokit"] = {"params": "demo_experiment:DemoParams"}
    path = folder / "demo.ipynb"
    nbformat.write(nb, path)
    return path


def as_typed(cls, texts):
    """The parameters that `nanokit run -p name=text …` makes of a notebook whose cell is the dataclass's own."""
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cls.parameter_lines())])
    nb.cells[0].metadata["tags"] = ["parameters"]
    nb.metadata["kernelspec"] = {"name": "python3", "language": "python", "display_name": "Python 3"}
    return cls.from_mapping(resolve(nb, texts, Path()).injected)
