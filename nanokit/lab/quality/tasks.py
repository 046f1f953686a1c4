"""Tasks of data/tasks: points with intervals, because a mean divergence does not say what broke.

An item has a prompt and an answer, and perhaps choices:

    {"id": "a-mul1-3", "prompt": "9 x 5 = 45\\n4 x 6 =", "answer": "24"}
    {"id": "q-12", "prompt": "What is ice?", "answer": "frozen water", "choices": ["frozen water", "a metal", …]}

Without choices the model writes on, greedily, and its first line has to be the answer, spaces at the ends apart. With
choices nothing is written: the right one must have the largest log-likelihood per byte of UTF-8, of all choices. (Per
byte and not per token, so that a choice gains nothing by being one rare token; without it short choices would win.)
Items with choices are asked through the model's chat template where it has one, as a user's question.

Two settings are compared item by item (McNemar 1947): only the items that one of them got right and the other did not
say anything about the difference. An unpaired comparison of 150 items cannot see less than ten points.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nanokit.engine.load import LoadedEngine
from nanokit.engine.sampling import Sampling
from nanokit.errors import NanokitError, ParameterError
from nanokit.lab.quality.intervals import wilson
from nanokit.model.batch import Batch
from nanokit.paths import data_dir

TASKS = ("arithmetic", "completion", "chat")  # those of data/tasks
TOGETHER = 16  # items whose choices are scored in one forward
SPARE = 8  # tokens that an answer may take beyond its own length before it is cut off


@dataclass(frozen=True)
class Item:
    """One item of a task; see the module. Without choices the tuple is empty."""

    id: str
    prompt: str
    answer: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class TaskScore:
    """Points of one task. right: item id -> whether it was right, in the task's order. given: item id -> what was
    answered."""

    task: str
    right: dict[str, bool]
    given: dict[str, str]

    @property
    def points(self) -> float:
        """Items that were right, per hundred."""
        return 100 * sum(self.right.values()) / len(self.right)

    @property
    def interval(self) -> tuple[float, float]:
        """Of the points, 95 % (`wilson`)."""
        low, high = wilson(sum(self.right.values()), len(self.right))
        return 100 * low, 100 * high


@dataclass(frozen=True)
class Paired:
    """Two settings on the same items. gained, lost: items that only the second, only the first got right.
    difference: points of the second less those of the first, with its 95 % interval; p: chance of a split of gained
    and lost at least this uneven if the settings were equal (exact binomial, two-sided)."""

    gained: int
    lost: int
    difference: float
    interval: tuple[float, float]
    p: float


def items(task: str) -> list[Item]:
    """The items of a task. Raises ParameterError for an unknown name."""
    if task not in TASKS:
        raise ParameterError("unknown task", found=repr(task), needed="one of " + ", ".join(TASKS))
    lines = (data_dir() / "tasks" / f"{task}.jsonl").read_text("utf-8").splitlines()
    return [Item(**{**raw, "choices": tuple(raw.get("choices", ()))}) for raw in map(json.loads, lines)]


def score(engine: LoadedEngine, task: str, limit: int = 0) -> TaskScore:
    """The points of an engine. limit: only so many items, spread evenly over the task; 0 is all.

    Raises ParameterError for an unknown task and for an engine with too few pages, RequestError for a context too
    short for an item.
    """
    every = items(task)
    few = every if not 0 < limit < len(every) else [every[i * len(every) // limit] for i in range(limit)]
    return score_items(engine, few, task)


def score_items(engine: LoadedEngine, chosen: Sequence[Item], task: str) -> TaskScore:
    """The points of an engine on items of one's own, under this name. Raises as `score` does."""
    written, picked = [x for x in chosen if not x.choices], [x for x in chosen if x.choices]
    found = _write(engine, written)
    for at in range(0, len(picked), TOGETHER):
        found |= _pick(engine, picked[at : at + TOGETHER])
    given = {item.id: found[item.id] for item in chosen}
    return TaskScore(task, {item.id: given[item.id] == item.answer for item in chosen}, given)


def paired(first: TaskScore, second: TaskScore) -> Paired:
    """How the second score differs from the first. Raises ParameterError for scores of other items.

    Interval: difference ± 1.96 se, with se² = (g + l - (g - l)² / n) / n² of gained g, lost l and n items.
    """
    if list(first.right) != list(second.right):
        raise ParameterError("two scores of different items cannot be compared", found=f"{first.task}, {second.task}")
    pairs = [(a, second.right[name]) for name, a in first.right.items()]
    n, gained, lost = len(pairs), sum(b and not a for a, b in pairs), sum(a and not b for a, b in pairs)
    difference = (gained - lost) / n
    half = 1.96 * math.sqrt(max(0.0, gained + lost - (gained - lost) ** 2 / n)) / n
    fewer, changed = min(gained, lost), gained + lost
    tail = sum(math.comb(changed, k) for k in range(fewer + 1)) / 2**changed
    interval = (100 * (difference - half), 100 * (difference + half))
    return Paired(gained, lost, 100 * difference, interval, min(1.0, 2 * tail))


def _write(engine: LoadedEngine, written: Sequence[Item]) -> dict[str, str]:
    """First lines of greedy answers, by item."""
    encode = engine.tokenizer.encode
    sampling = [
        Sampling(max_tokens=len(encode(" " + item.answer, add_special=False)) + SPARE, stop=("\n",)) for item in written
    ]
    done = engine.generate([encode(item.prompt) for item in written], sampling) if written else []
    return {item.id: answer.text.strip() for item, answer in zip(written, done, strict=True)}


def _pick(engine: LoadedEngine, picked: Sequence[Item]) -> dict[str, str]:
    """The likeliest choices, by item. The pages of a prompt serve all its choices: each is written over the one before
    it."""
    prompts = [_question(engine, item.prompt) for item in picked]
    lead = "" if engine.tokenizer.chat_template else " "
    choices = [[engine.tokenizer.encode(lead + c, add_special=False) for c in item.choices] for item in picked]
    size = engine.config.block_size
    needs = [-(-(len(p) + max(map(len, c))) // size) for p, c in zip(prompts, choices, strict=True)]
    if sum(needs) > engine.pool.available:
        raise ParameterError(
            "the engine has too few KV pages for the items of a task",
            found=f"{engine.pool.available} free blocks",
            needed=f"{sum(needs)} for {len(picked)} items at once",
            do="load with a larger ctx, max_seqs or kv_memory",
        )
    tables = [[engine.pool.allocate() for _ in range(need)] for need in needs]
    try:
        return _likeliest(engine, picked, prompts, choices, tables)
    finally:
        for table in tables:
            engine.pool.release(table)


def _likeliest(
    engine: LoadedEngine,
    picked: Sequence[Item],
    prompts: list[list[int]],
    choices: list[list[list[int]]],
    tables: list[list[int]],
) -> dict[str, str]:
    lens = [len(prompt) for prompt in prompts]
    batch = Batch([token for prompt in prompts for token in prompt], lens, lens, tables)
    ends = torch.tensor(lens).cumsum(0) - 1
    before = _log_probabilities(engine, engine.model.forward(batch, engine.kv)[ends])
    best: dict[str, tuple[float, str]] = {}
    for turn in range(max(map(len, choices))):
        rows = [i for i in range(len(picked)) if turn < len(choices[i])]
        ids = [choices[i][turn] for i in rows]
        sizes = [len(each) for each in ids]
        flat = [token for own in ids for token in own]
        step = Batch(flat, sizes, [lens[i] + n for i, n in zip(rows, sizes, strict=True)], [tables[i] for i in rows])
        states = engine.model.forward(step, engine.kv).split(sizes)
        for i, own, state in zip(rows, ids, states, strict=True):
            total = float(before[i, own[0]])
            if len(own) > 1:
                after = _log_probabilities(engine, state[:-1].contiguous())
                total += float(after.gather(1, torch.tensor(own[1:])[:, None]).sum())
            choice = picked[i].choices[turn]
            best[picked[i].id] = max(best.get(picked[i].id, (-math.inf, "")), (total / len(choice.encode()), choice))
    return {name: choice for name, (_, choice) in best.items()}


def _log_probabilities(engine: LoadedEngine, hidden: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits = engine.model.head.logits(hidden.contiguous()).cpu().double()
    if not logits.isfinite().all():
        raise NanokitError("the model's logits are not numbers", needed="finite logits", do="try another policy")
    return logits.log_softmax(-1)


def _question(engine: LoadedEngine, prompt: str) -> list[int]:
    if engine.tokenizer.chat_template:
        return engine.tokenizer.chat_ids([{"role": "user", "content": prompt}])
    return engine.tokenizer.encode(f"Question: {prompt}\nAnswer:")
