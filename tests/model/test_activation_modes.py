"""What the activation modes of the C kernels keep of the real model, against activations in fp32 (the reference, which
equals transformers: test_default_model.py).

Two figures for each mode on the first 512 tokens of the kit's text: KL, the mean over positions of KL(fp32 || mode),
and top-1, the share of positions whose best token is the same. And what a person would notice first: greedy text. Two
computations that differ by rounding must part where the two best logits are closer to each other than the rounding;
such ties are audited, not excused: each is printed with its gap in fp32, and a larger gap fails.
"""

from math import sqrt
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanokit.engine.load import LoadedEngine, load
from nanokit.engine.sampling import Sampling
from nanokit.kv.pages import PagedKV
from nanokit.model.batch import Batch
from nanokit.paths import data_dir

pytestmark = pytest.mark.model

TOKENS = 512
BOUNDS = {"a16": (1e-5, 1.0), "a8g16": (2e-3, 0.97), "a8g32": (4e-3, 0.955)}  # KL at most, top-1 at least
GAP = 0.02  # of two logits that rounding may swap: ten times what fp16 pages and a16 move one by, whose spread is six
PROMPTS = [
    "The ferry to the island leaves", "A short letter to my landlord:", "To sharpen a kitchen knife,",
    "In the year 1911, the harbour", "Our goal for the second quarter is", "def median(values):",
    "The three laws of thermodynamics are", "Once the snow had melted,", "My grandmother's recipe for bread",
    "The difference between a frog and a toad", "Dear committee, I am writing", "Trees communicate through",
    "Q: What is a prime number?\nA:", "The train stopped between two stations", "Breaking news: the city council",
    "Roses need water, light and", "He opened the box and found", "A list of five European rivers:",
    "When the tide goes out,", "The capital of Norway is Oslo, and",
]  # fmt: skip


def logits(engine: LoadedEngine, ids: list[int], kv_format: str = "fp32") -> Tensor:
    blocks = -(-len(ids) // 64)
    pages = PagedKV(engine.model.config, blocks, kv_format)
    batch = Batch(ids, [len(ids)], [len(ids)], [list(range(blocks))])
    return engine.model.head.logits(engine.model.forward(batch, pages))


@pytest.fixture(scope="module")
def on_text(exact_engine: LoadedEngine) -> tuple[list[int], Tensor]:
    """The text's tokens and their log probabilities in fp32."""
    text = (data_dir() / "texts" / "lighthouse.txt").read_text("utf-8")
    ids = exact_engine.tokenizer.encode(text)[:TOKENS]
    return ids, logits(exact_engine, ids).log_softmax(-1)


@pytest.mark.parametrize("mode", BOUNDS)
def test_a_mode_keeps_what_it_promises(default_model: Path, on_text: tuple[list[int], Tensor], mode: str) -> None:
    """The bounds are those of the issue that asked for the kernels. A scale from the wrong group or a place left
    unquantized moves these figures before it moves any single answer. The share of equal tokens is a count of some
    hundred: it is held against its bound up to two standard errors, and KL, which knows no ties, as it is."""
    ids, wanted = on_text
    model = load(default_model, activations=mode, kv_memory="64MiB")
    assert model.model.compiled
    got = logits(model, ids).log_softmax(-1)
    kl = float((wanted.exp() * (wanted - got)).sum(-1).mean())
    top1 = float((wanted.argmax(-1) == got.argmax(-1)).float().mean())
    print(f"{mode}: KL {kl:.3g}, top-1 {top1:.2%}")  # noqa: T201 - shown with -s
    most, least = BOUNDS[mode]
    assert -1e-6 < kl < most
    assert top1 >= least - 2 * sqrt(least * (1 - least) / len(ids))


def test_greedy_text_in_a16_is_that_of_fp32(default_model: Path, exact_engine: LoadedEngine) -> None:
    """Twenty texts of 60 tokens with fp16 pages, up to audited ties. One forward of the reference over a finished text
    has the same best tokens as its own greedy decoding would up to the first that differs, in a twentieth of the time.
    """
    fast = load(default_model, activations="a16", kv_format="fp16", max_seqs=20, kv_memory="256MiB")
    assert fast.model.compiled
    gaps = []
    for done, prompt in zip(fast.generate(PROMPTS, Sampling(max_tokens=60, ignore_eos=True)), PROMPTS, strict=True):
        ours, asked = torch.tensor(done.token_ids), exact_engine.tokenizer.encode(prompt)
        assert len(ours) == 60
        rows = logits(exact_engine, asked + done.token_ids)[len(asked) - 1 : -1]
        differs = (rows.argmax(-1) != ours).nonzero()
        if len(differs):
            at = int(differs[0])
            gaps.append(float(rows[at].max() - rows[at, ours[at]]))
            print(f"{prompt!r} parts at token {at}, where fp32's best two are {gaps[-1]:.2g} apart")  # noqa: T201 - shown with -s
    print(f"{len(PROMPTS) - len(gaps)} of {len(PROMPTS)} texts are equal to the last token")  # noqa: T201 - shown with -s
    assert len(PROMPTS) == 20
    assert len(gaps) <= 3
    assert all(gap < GAP for gap in gaps)
