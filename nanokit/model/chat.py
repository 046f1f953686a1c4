"""Chat templates: messages -> the text that a model was tuned on.

A template is a small program that comes with a model's files, so it is run as foreign code: in jinja2's
immutable sandbox (no attributes that start with an underscore, no changes to what it is given), on plain
copies of the messages, with a budget of loop turns and macro calls, of output and of what a multiplication
may build. What it finds there is what transformers offers (`raise_exception`, `strftime_now`, `tojson`,
the `generation` tag, `break` and `continue`, trimmed blocks), so that the text is the same to the letter.

The turns are counted by a call that is put into the body of every loop and macro of the parsed template;
jinja2's own limit on `range` alone does not stop nested loops, and a timeout would need a thread or a signal.
Memory is not limited beyond that: a template can still pad or double a string until it is huge.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from nanokit.errors import TokenizerError

MAX_TEMPLATE = 1_000_000  # characters
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
MAX_OUTPUT = 10_000_000  # characters
MAX_TURNS = 200_000  # loop turns and macro calls of one rendering

# What foreign template code can raise: jinja2's own errors, and Python's from the operations it performs.
_FAULTS = (
    TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, SyntaxError,
    TypeError, ValueError,
)  # fmt: skip


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what is to be trained on; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012  (the name and type that jinja2 looks for)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda style: datetime.now().strftime(style)
        self.budget = threading.local()  # one rendering per thread at a time

    def take_turn(self) -> str:
        self.budget.turns -= 1
        if self.budget.turns < 0:
            raise TemplateError(f"more than {MAX_TURNS} loop turns and macro calls")
        return ""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """jinja2 would let a forbidden attribute print as nothing; a template that asks for one is refused."""
        raise SecurityError(f"the attribute {attribute!r} of a {type(obj).__name__} is out of bounds")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int):
                if isinstance(value, int):
                    size = value.bit_length() if operator == "**" else 0
                else:
                    size = len(value) if hasattr(value, "__len__") else 0
                if size * abs(times) > MAX_OUTPUT:
                    raise TemplateError(f"the result of {operator} would be larger than {MAX_OUTPUT}")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """A compiled chat template. Raises TokenizerError when the source is too large or not a template."""

    def __init__(self, source: str) -> None:
        if not isinstance(source, str):  # GGUF metadata may hold anything under the template's key
            raise _failure(f"{source!r:.80}", "a text")
        if len(source) > MAX_TEMPLATE:
            raise _failure(f"{len(source)} characters", f"at most {MAX_TEMPLATE}")
        self._sandbox = _Sandbox()
        try:
            tree = self._sandbox.parse(source)
            blocks: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
                *tree.find_all(nodes.For), *tree.find_all(nodes.Macro), *tree.find_all(nodes.CallBlock)
            ]  # fmt: skip
            for block in blocks:
                turn = nodes.Call(nodes.EnvironmentAttribute("take_turn"), [], [], None, None)
                block.body.insert(0, nodes.ExprStmt(turn).set_lineno(block.lineno))
            self._template = self._sandbox.from_string(tree)
        except _FAULTS as error:
            raise _failure(error, "a jinja2 template") from error

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        special_texts: Mapping[str, str],
    ) -> str:
        """The text of `messages`. Raises TokenizerError for malformed ones and when the template fails."""
        chat = _plain(messages)
        self._sandbox.budget.turns = MAX_TURNS
        pieces, length = [], 0
        try:
            for piece in self._template.generate(
                messages=chat,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **special_texts,
            ):
                length += len(piece)
                if length > MAX_OUTPUT:
                    raise TemplateError(f"more than {MAX_OUTPUT} characters of output")
                pieces.append(piece)
        except _FAULTS as error:
            raise _failure(error, "a template that accepts these messages") from error
        return "".join(pieces)


def _plain(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Copies made of `dict` and `str` only: what the template gets has no methods of anyone's classes."""
    whole = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
    if not whole or not all(isinstance(message, Mapping) for message in messages):
        raise _bad_messages(f"{type(messages).__name__}: {str(messages)[:80]}")
    for message in messages:
        texts = all(isinstance(text, str) for pair in message.items() for text in pair)
        if not texts or not {"role", "content"} <= message.keys():
            raise _bad_messages(str(dict(message))[:200])
        if message["role"] not in ROLES:
            raise TokenizerError(
                "a chat message has an unknown role",
                found=repr(message["role"])[:80],
                needed="one of " + ", ".join(ROLES),
                do="most templates would render it all the same, and the model answer to nobody",
            )
    return [{str.__str__(key): str.__str__(value) for key, value in message.items()} for message in messages]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes for HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _bad_messages(found: str) -> TokenizerError:
    return TokenizerError(
        "these are not chat messages",
        found=found,
        needed="a list, not empty, of mappings with the texts 'role' and 'content'",
        do='write [{"role": "user", "content": "…"}]',
    )


def _failure(fault: object, needed: str) -> TokenizerError:
    found = f"{type(fault).__name__}: {fault}" if isinstance(fault, BaseException) else fault
    return TokenizerError(
        "the model's chat template failed",
        found=found,
        needed=needed,
        do="check the messages, or give the model a plain prompt instead",
    )
