"""The real model against transformers on the same file."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nanokit.engine.load import LoadedEngine
from nanokit.engine.sampling import Sampling
from nanokit.kv.pages import PagedKV
from nanokit.model.batch import Batch
from nanokit.model.load import open_model
from nanokit.paths import data_dir

pytestmark = pytest.mark.model

MOON = "Write three sentences about the moon."


def test_logits_on_a_text_of_512_tokens(exact_engine: LoadedEngine, oracle: torch.nn.Module) -> None:
    """max |Δ| < 1e-3 in fp32 and the same best token at every position: a wrong rope base or one swapped layer stays
    below what 4-bit weights lose anyway, so that nothing less than this shows it."""
    text = (data_dir() / "texts" / "lighthouse.txt").read_text("utf-8")
    ids = exact_engine.tokenizer.encode(text)[:512]
    assert len(ids) == 512
    pages = PagedKV(exact_engine.model.config, 8)
    ours = exact_engine.model.head.logits(exact_engine.model.forward(Batch(ids, [512], [512], [list(range(8))]), pages))
    with torch.inference_mode():
        theirs = oracle(torch.tensor([ids])).logits[0]
    assert (ours - theirs).abs().max() < 1e-3
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("raw", [False, True], ids=["chat template", "raw"])
def test_the_command_line_gives_greedy_ids_of_transformers(
    engine: LoadedEngine, oracle: torch.nn.Module, default_model: Path, raw: bool
) -> None:
    """`nanokit generate … --temperature 0 --max-tokens 40 --activations fp32`, in a process of its own."""
    prompt = "The moon is" if raw else MOON
    options = ["--temperature", "0", "--max-tokens", "40", "--activations", "fp32", "--json"] + ["--raw"] * raw
    command = [
        sys.executable,
        "-m",
        "nanokit.cli",
        "generate",
        prompt,
        *options,
        "--model",
        str(default_model),
    ]
    done = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    ids = torch.tensor([done["prompt_ids"]])
    expected = oracle.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0,
        eos_token_id=list(engine.tokenizer.eos_ids),
    )[0, ids.shape[1] :].tolist()  # fmt: skip
    assert done["token_ids"] == expected
    assert len(expected) == 40 or done["finish_reason"] == "stop"
    assert done["text"] == engine.tokenizer.decode(expected)


def test_batch_chunks_and_prefix_hits_do_not_change_answers(engine: LoadedEngine) -> None:
    """The same questions alone and in a batch of sixteen, some of them twice: greedy ids must be equal."""
    prompts = [f"{start} is the thing that {end}" for start in ("Water", "Fire", "A city", "The law")
               for end in ("matters most", "we lost", "keeps people together", "nobody sees")]  # fmt: skip
    prompts[5] = prompts[0] = "The harbour master walked along the quay. " * 20 + "Then he"
    sampling = Sampling(max_tokens=12)
    together = engine.generate(prompts, sampling)
    alone = [engine.generate([prompt], sampling)[0] for prompt in prompts]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert alone[0].cached_tokens > 0
    engine.check_integrity()


def test_both_end_of_sequence_ids_are_known(engine: LoadedEngine) -> None:
    """An instruct model ends a turn with <|im_end|> and a document with <|endoftext|>: honouring one babbles on."""
    names = {engine.tokenizer.decode([i], skip_special=False) for i in engine.tokenizer.eos_ids}
    assert names == {"<|im_end|>", "<|endoftext|>"}


def test_reader_and_tokenizer_are_ready_in_time(default_model: Path) -> None:
    """Under 1.5 s with the file in the page cache; dequantization is not counted. The best of three: a busy machine
    makes a run slow, but cannot make one fast."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        open_model(default_model)
        times.append(time.perf_counter() - start)
    assert min(times) < 1.5, times


def test_importing_nanokit_is_cheap() -> None:
    """transformers alone takes more than a second to import and is needed by no command."""
    code = (
        "import sys, nanokit, nanokit.cli\nassert 'torch' not in sys.modules\n"
        "import nanokit.engine.load, nanokit.lab.experiments.tour\nassert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
