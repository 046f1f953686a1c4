"""`nanokit generate` and `nanokit chat`: an engine at a terminal, tokens as they come.

An instruct model continued without its chat template ends at once or talks past the question, so `generate` sends
the prompt as one user turn when the model has a template, and `--raw` continues the text itself.
"""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from nanokit.engine.engine import Engine
from nanokit.engine.load import LoadedEngine, load
from nanokit.engine.request import Completion
from nanokit.engine.sampling import Sampling
from nanokit.errors import RequestError, TokenizerError

LOAD_OPTIONS = ("ctx", "kv_memory", "kv_format", "activations", "rope_freq_base", "rope_freq_scale", "force")
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "seed")


def generate(args: argparse.Namespace) -> int:
    """Answer one prompt. The text goes to standard output, the speed to standard error."""
    sampling = _sampling(args)
    prompt = _read_stdin() if args.prompt == "-" else args.prompt
    if not prompt.strip():
        raise RequestError("the prompt is empty", found=repr(prompt), needed="some text")
    engine = _load(args)
    if args.raw or engine.tokenizer.chat_template is None:
        ids = engine.tokenizer.encode(prompt)
    else:
        ids = engine.tokenizer.chat_ids([{"role": "user", "content": prompt}])
    done = _answer(engine, ids, sampling, quiet=args.json)
    if args.json:
        print(json.dumps({"model": engine.model.name, "prompt_ids": ids, **asdict(done)}, ensure_ascii=False))
    else:
        _report(done)
    return 0


def chat(args: argparse.Namespace) -> int:
    """Turns from standard input until it ends; `/reset` forgets the conversation."""
    sampling = _sampling(args)
    engine = _load(args)
    if engine.tokenizer.chat_template is None:
        raise TokenizerError(
            f"{engine.model.name} has no chat template",
            needed="an instruct model",
            do="use `nanokit generate --raw` to continue a text",
        )
    opening = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(opening)
    interactive = sys.stdin.isatty()
    if interactive:
        print("One line a turn. Ctrl-C stops an answer, /reset forgets, Ctrl-D ends.", file=sys.stderr)
    while True:
        line = _next_line(interactive)
        if line is None:
            return 0
        if line == "/reset":
            messages = list(opening)
        elif line:
            _turn(engine, messages, line, sampling)


def _turn(engine: LoadedEngine, messages: list[dict[str, str]], line: str, sampling: Sampling) -> None:
    """One question and its answer, appended to messages; a question that cannot be served is not kept."""
    messages.append({"role": "user", "content": line})
    try:
        done = _answer(engine, engine.tokenizer.chat_ids(messages), sampling)
    except KeyboardInterrupt:
        messages.pop()
        print("\n[stopped; the turn is forgotten]", file=sys.stderr)
        return
    except (RequestError, TokenizerError) as error:
        messages.pop()
        print(
            f"nanokit: {error}\n  do: shorten the turn, or /reset to forget the conversation", file=sys.stderr
        )
        return
    messages.append({"role": "assistant", "content": done.text})
    _report(done)


def _answer(engine: Engine, ids: list[int], sampling: Sampling, *, quiet: bool = False) -> Completion:
    with engine.stream(ids, sampling) as stream:
        for chunk in stream:
            if not quiet:
                print(chunk.text, end="", flush=True)
            if chunk.completion is not None:
                if not quiet:
                    print(flush=True)
                return chunk.completion
    raise AssertionError("a stream ends with a completion")


def _report(done: Completion) -> None:
    itl, ttft = done.timings.itl_ms, done.timings.ttft_ms
    speed = f", {1e3 * len(itl) / sum(itl):.1f} tok/s" if itl else ""
    print(
        f"[{done.generated_tokens} tokens ({done.finish_reason}) after {done.prompt_tokens} of prompt, "
        f"{done.cached_tokens} cached; first token {ttft or 0:.0f} ms{speed}; seed {done.seed}]",
        file=sys.stderr,
    )


def _load(args: argparse.Namespace) -> LoadedEngine:
    source = args.model
    if source is None:
        from nanokit.model.fetch import TerminalProgress, resolve_default

        with TerminalProgress() as progress:
            source = resolve_default(progress)
    return load(source, max_seqs=1, **_given(args, LOAD_OPTIONS))


def _sampling(args: argparse.Namespace) -> Sampling:
    return Sampling(stop=tuple(args.stop or ()), **_given(args, SAMPLING_OPTIONS))


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """The options that were given; defaults live where they belong, not in the parser."""
    return {name: getattr(args, name) for name in names if getattr(args, name) not in (None, False)}


def _read_stdin() -> str:
    raw = sys.stdin.buffer.read()
    try:
        return raw.decode("utf-8").rstrip("\n")
    except UnicodeDecodeError as error:
        raise RequestError(
            "standard input is not UTF-8",
            found=f"byte {error.start}: {raw[error.start]:#04x}",
            needed="UTF-8 text",
        ) from None


def _next_line(interactive: bool) -> str | None:
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return ""
