"""Chat templates: as transformers renders them, and as foreign code that must not get away with anything."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest
from tokenizer_corpus import CHATS, byte_level_metadata

from nanokit.errors import TokenizerError
from nanokit.model.chat import ChatTemplate
from nanokit.model.tokenizer import Tokenizer

LLAMA3 = (
    "{{- bos_token }}\n{%- if tools is not none %}\n    {{- 'tools' }}\n{%- endif %}\n"
    "{%- for message in messages %}\n    {%- if message.role not in ['user', 'assistant', 'system'] %}\n"
    "        {{- raise_exception('unknown role ' + message.role) }}\n    {%- endif %}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim }}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant' }}\n{%- endif %}\n"
)
BLOCKS = """
{% macro shown(message) %}
    [{{ message.role|upper }}: {{ message.content|tojson }}]
{% endmacro %}
{% set ns = namespace(count=0) %}
{% for message in messages %}
    {% if loop.index > 2 %}
        {% break %}
    {% endif %}
    {% set ns.count = ns.count + 1 %}
{{ shown(message) }}{% generation %}{{ loop.index * 2 }}{% endgeneration %}
    {% if message.role == 'user' %}{% continue %}{% endif %}
    {{ 'x' * 3 }}{{ documents }}
{% endfor %}
{{ ns.count }}{{ eos_token }}{{ undefined_thing }}{{ messages|length ** 2 }}
"""


def rendered(source: str, chat: list[dict[str, str]] | None = None, **texts: str) -> str:
    return ChatTemplate(source).render(chat or CHATS[0], add_generation_prompt=True, special_texts=texts)


@pytest.mark.parametrize("source", [LLAMA3, BLOCKS])
@pytest.mark.parametrize("prompt", [True, False])
def test_text_is_that_of_transformers(source: str, prompt: bool) -> None:
    """White space around blocks, tojson without HTML escapes, break/continue, None for tools, undefined as nothing."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts = {"bos_token": "<s>", "eos_token": "</s>"}
    for chat in [*CHATS, [{"role": "user", "content": "<a href='x'>é & \"q\"</a>"}]]:
        expected = render_jinja_template([chat], chat_template=source, add_generation_prompt=prompt, **texts)[0][0]
        ours = ChatTemplate(source).render(chat, add_generation_prompt=prompt, special_texts=texts)
        assert ours == expected


def test_strftime_now_is_there() -> None:
    """Llama-3's templates write the date."""
    assert rendered("{{ strftime_now('%Y') }}").isdigit()


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ messages[0].__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages|attr('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
        "{{ self.__init__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
    ],
)
def test_forbidden_attributes_are_refused(source: str) -> None:
    """The sandbox's usual ways out; none runs, none is passed over in silence."""
    with pytest.raises(TokenizerError, match="chat template"):
        rendered(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ [0] * 10**9 }}",
        "{{ (2 ** 1000000) ** 1000000 }}",
        "{% set take_turn = 1 %}{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    ],
)
def test_work_and_output_are_bounded(source: str) -> None:
    """A template that would run for hours, or fill the memory, ends in an error at once."""
    with pytest.raises(TokenizerError, match="chat template"):
        rendered(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}", "{% for %}", "{{", "{{ 1 / 0 }}", "{{ messages[0].content.a.b }}", "{{ nothing() }}",
        "{{ 1 + 'a' }}", "{% include 'x' %}", "{{ messages|nofilter }}", "{{ raise_exception('no system role') }}",
        "(" * 5 + "{{ " + "(" * 5000 + ")" * 5000 + " }}", "x" * 1_000_001,
    ],
)  # fmt: skip
def test_a_template_that_fails_is_one_clear_error(source: str) -> None:
    """Syntax, arithmetic, missing names, too deep, too long, and what the template itself complains about."""
    with pytest.raises(TokenizerError, match="chat template failed") as caught:
        rendered(source)
    assert ("no system role" in str(caught.value)) == ("no system role" in source)


@pytest.mark.parametrize(
    "messages",
    [
        [], "hello", None, {"role": "user", "content": "x"}, ["hello"], [{"role": "user"}], [{"content": "x"}],
        [{"role": "user", "content": 3}], [{"role": None, "content": "x"}], [{"role": "user", "content": ["x"]}],
    ],
)  # fmt: skip
def test_what_is_not_a_chat_is_refused(messages: Any) -> None:
    """Before the template sees it: templates fail in odd ways, or write `None` into the prompt."""
    with pytest.raises(TokenizerError, match="not chat messages"):
        ChatTemplate("{{ messages }}").render(messages, add_generation_prompt=True, special_texts={})


def test_the_template_gets_plain_copies() -> None:
    """A message of some class has methods that the sandbox knows nothing about."""

    class Message(dict[str, str]):
        def launch(self) -> str:
            return "launched"

    class Text(str):
        def launch(self) -> str:
            return "launched"

    chat = [Message(role="user", content=Text("x"))]
    with pytest.raises(TokenizerError):
        rendered("{{ messages[0].launch() }}", chat)
    with pytest.raises(TokenizerError):
        rendered("{{ messages[0].content.launch() }}", chat)
    assert rendered("{{ messages[0].content }}", chat) == "x"


def test_budgets_of_two_threads_do_not_mix() -> None:
    """A panel's worker and a cell may render with the same tokenizer at the same time."""
    template = ChatTemplate("{% for i in range(60000) %}{% endfor %}{{ messages[0].content }}")
    results: list[str] = []

    def work(name: str) -> None:
        for _ in range(3):
            chat: list[Mapping[str, str]] = [{"role": "user", "content": name}]
            results.append(template.render(chat, add_generation_prompt=True, special_texts={}))

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted("abcd" * 3)


def test_a_model_without_a_template_says_so() -> None:
    """A base model asked to chat."""
    with pytest.raises(TokenizerError, match="no chat template"):
        Tokenizer.from_gguf(byte_level_metadata()).chat_text(CHATS[0])


@pytest.mark.parametrize("source", [5, ["{{ messages }}"]])
def test_a_template_that_is_no_text_is_refused(source: Any) -> None:
    """The key of a GGUF file may hold a number or an array."""
    with pytest.raises(TokenizerError, match="chat template failed"):
        Tokenizer.from_gguf({**byte_level_metadata(), "tokenizer.chat_template": source}).chat_text(CHATS[0])


def test_an_unknown_role_is_refused() -> None:
    """A template renders "usr" as it stands, and the model sees a conversation that nobody had."""
    with pytest.raises(TokenizerError, match="unknown role"):
        ChatTemplate("{{ messages[0].role }}").render(
            [{"role": "usr", "content": "hi"}], add_generation_prompt=True, special_texts={}
        )
