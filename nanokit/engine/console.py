"""`nanokit generate` and `nanokit chat`: an engine at a terminal, tokens as they come.

An instruct model continued without its chat template ends at once or talks past the question, so `generate` sends
the prompt as one user turn when the model has a template, and `--raw` continues the text itself.

Python keeps bytes of the command line that are no UTF-8 as lone surrogates. Standard input is read the same way, so
that one check refuses both before a model is loaded.
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
from nanokit.errors import ParameterError, RequestError, TokenizerError

LOAD_OPTIONS = (
    "ctx", "kv_memory", "kv_format", "activations", "policy", "device", "mapped", "rope_freq_base", "rope_freq_scale",
    "force",
)  # fmt: skip
CHAT_HELP = "One line a turn. Ctrl-C stops an answer, /reset forgets the conversation, /help says this, Ctrl-D ends."
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "seed")


def generate(args: argparse.Namespace) -> int:
    """Answer one prompt. The text goes to standard output, the speed to standard error."""
    sampling = _sampling(args)
    if args.prompt == "-" or (args.prompt is None and not sys.stdin.isatty()):
        prompt = _utf8(_read_stdin(), "standard input")
    else:
        prompt = _utf8(args.prompt or "", "the prompt")
    if not prompt.strip():
        raise RequestError(
            "the prompt is empty", found=repr(prompt), needed="some text", do="write it after `generate`"
        )
    engine = _load(args)
    if args.raw or engine.tokenizer.chat_template is None:
        ids = engine.tokenizer.encode(prompt)
    else:
        ids = engine.tokenizer.chat_ids([{"role": "user", "content": prompt}])
    done = _answer(engine, ids, sampling, quiet=args.json)
    if args.json:
        print(json.dumps({"model": engine.model.name, "prompt_ids": ids, **asdict(done)}, ensure_ascii=False))
    else:
        _report(done, sampling)
    return 0


def chat(args: argparse.Namespace) -> int:
    """Turns from standard input until it ends. A turn that could not be served makes the exit code 2 when a program,
    not a person, feeds them."""
    sampling = _sampling(args)
    opening = [{"role": "system", "content": _utf8(args.system, "--system")}] if args.system else []
    engine = _load(args)
    if engine.tokenizer.chat_template is None:
        raise TokenizerError(
            f"{engine.model.name} has no chat template",
            needed="an instruct model",
            do="use `nanokit generate --raw` to continue a text",
        )
    messages = list(opening)
    interactive = sys.stdin.isatty()
    sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr] # a TextIOWrapper here
    if interactive:
        print(CHAT_HELP, file=sys.stderr)
    code = 0
    while True:
        line = _next_line(interactive)
        if line is None:
            return code
        if line == "/reset":
            messages = list(opening)
        elif line.startswith("/"):
            print(CHAT_HELP, file=sys.stderr)
        elif line:
            try:
                messages = _turn(engine, messages, line, sampling)
            except (RequestError, TokenizerError) as error:
                print(f"nanokit: {error}\n[the turn is forgotten; /reset forgets all]", file=sys.stderr)
                code = code if interactive else error.exit_code
            except KeyboardInterrupt:
                if not interactive:
                    raise
                print("\n[stopped; the turn is forgotten]", file=sys.stderr)


def _turn(engine: LoadedEngine, messages: list[dict[str, str]], line: str, sampling: Sampling) -> list[dict[str, str]]:
    """Print the answer to one question; returns the conversation with both, and leaves the old one alone."""
    asked = [*messages, {"role": "user", "content": line}]
    done = _answer(engine, engine.tokenizer.chat_ids(asked), sampling)
    _report(done, sampling)
    return [*asked, {"role": "assistant", "content": done.text}]


def _answer(engine: Engine, ids: list[int], sampling: Sampling, *, quiet: bool = False) -> Completion:
    with engine.stream(ids, sampling) as stream:
        try:
            for chunk in stream:
                if not quiet:
                    print(chunk.text, end="", flush=True)
                if chunk.completion is not None:
                    return chunk.completion
        finally:  # an interrupted answer ends its line too
            if not quiet:
                print(flush=True)
    raise AssertionError("a stream ends with a completion")


def _report(done: Completion, sampling: Sampling) -> None:
    itl, ttft = done.timings.itl_ms, done.timings.ttft_ms
    speed = f", {1e3 * len(itl) / sum(itl):.1f} tok/s" if itl else ""
    seed = "" if sampling.is_greedy else f"; seed {done.seed}"
    print(
        f"[{done.generated_tokens} tokens ({done.finish_reason}) after {done.prompt_tokens} of prompt, "
        f"{done.cached_tokens} cached; first token {ttft or 0:.0f} ms{speed}{seed}]",
        file=sys.stderr,
    )


def _load(args: argparse.Namespace) -> LoadedEngine:
    source = args.model
    if source == "":  # an unset variable of a script, which must not become the working directory
        raise ParameterError("--model is empty", needed="a file, a folder or org/name", do="or leave it out")
    if source is None:
        from nanokit.model.fetch import TerminalProgress, resolve_default

        with TerminalProgress() as progress:
            source = resolve_default(progress)
    options = _given(args, LOAD_OPTIONS)
    if args.dynamic_scale is not None:
        options["activations"] = _scale_mode(args.dynamic_scale, args.activations)
    return load(source, max_seqs=1, **options)


def _scale_mode(dynamic: str, activations: str | None) -> str:
    """What --dynamic-scale stands for."""
    if dynamic not in ("true", "false"):
        raise ParameterError("--dynamic-scale is not a truth value", found=repr(dynamic), needed="true or false")
    if activations is not None:
        raise ParameterError(
            "--dynamic-scale and --activations both name an activation mode",
            found=f"{dynamic} and {activations}",
            needed="one of the two",
        )
    return "token" if dynamic == "true" else "static"


def _sampling(args: argparse.Namespace) -> Sampling:
    return Sampling(stop=tuple(args.stop or ()), **_given(args, SAMPLING_OPTIONS))


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """The options that were given, a typed 0 among them; defaults live where they belong, not in the parser."""
    given = {name: getattr(args, name) for name in names}
    return {name: value for name, value in given.items() if value is not None and value is not False}


def _read_stdin() -> str:
    return sys.stdin.buffer.read().decode("utf-8", "surrogateescape").rstrip("\n")


def _utf8(text: str, what: str) -> str:
    """The text, if all of it came in as UTF-8. Raises RequestError naming the first byte that did not."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{what} is not UTF-8",
            found=f"byte {ord(text[error.start]) & 0xFF:#04x} after {error.start} characters",
            needed="UTF-8 text",
        ) from None
    return text


def _next_line(interactive: bool) -> str | None:
    try:
        return _utf8(input("> " if interactive else "").strip(), "the turn")
    except EOFError:
        return None
    except KeyboardInterrupt:
        if not interactive:
            raise
        print(file=sys.stderr)
        return ""
