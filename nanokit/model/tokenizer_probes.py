"""Texts on which tokenizers tell themselves apart, and the first one on which two of them do.

Written for the places where pre-tokenizers differ: digits alone or in threes, contractions in capitals, line ends,
runs of white space, marks that a normalizer would compose, letters with and without case. The vocabulary's own tokens
come on top: one that no merge makes shows whether a whole word skips the merges. Agreement on all of it is no proof
for every text; a table of names alone, which is what converters go by, is none for any.
"""

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nanokit.model.tokenizer import Tokenizer

TEXTS = (
    "",
    " ",
    "   ",
    "\n",
    "\n\n\n",
    "\r\n\r\n",
    " \n  \n\t \n x",
    "Two words, one comma; three   spaces,\ttabs\t\tand a full stop. ",
    " leading and trailing  ",
    "0 12 345 6789 12345 3.14159 1,000,000 2024-11-30 7x8 v2.0 ½ ² ٣٤ 一二三",
    "It's WE'VE, don't SHOULDN'T I'm I'M you'll YOU'LL they'd THEY'D he's HE'S 'tis rock'n'roll",
    "camelCase HTTPServer XMLHttpRequest snake_case SCREAMING_CASE Title Case ǅungla ʰa",
    "Größe naïve café Ærøskøbing İstanbul ΑΒΓ αβγ Привет МИР",
    "cafe\u0301 A\u030angstro\u0308m \u212b \ufb01 \u1e9b\u0323 e\u0301e\u0301",
    "你好，世界！今天是11月30日。 こんにちは カタカナ 漢字 안녕하세요",
    "नमस्ते दुनिया ภาษาไทย مرحبا بالعالم שלום עולם தமிழ்",
    "🙂 👩‍👩‍👧‍👦 🇩🇪 🏳️‍🌈 👍🏽 a🙂b",
    "def f(x: int) -> str:\n    if x >= 10:\n        return f'{x:>8}'  # note\n\n\n\treturn \"\"\n",
    "for (int i = 0; i < n; ++i) { a[i] |= ~b & 0xFF; }\r\n// done\r\n",
    '<p class="x">A &amp; B</p> https://example.org/a/b?c=1&d=2#e me@example.org C:\\dir\\x',
    "!!! ??? ... --- ==== ____ ~~~~ #### //// ``` $$ %% ^^ && ** (( )) [[ ]] {{ }}\n)))\n/\n",
    "a\u00a0b\u2003c\u200bd\ufeffe\u3000f\u2028g",
    "\x00\x01\x1b[0m\x7f",
    "aaaa" * 20 + " " * 33 + "b" * 33 + "=" * 33 + "\n" * 7 + "\t" * 5,
)
# What pre-tokenizers tell apart, in any order; some of it often, so that runs of it come up.
CHARACTERS = (
    *"0123123\u0663",
    *"aAbBzs",
    *"  \n\n\t\r",
    *".,/'-_(\"",
    "'S",
    "'ll",
    "é",
    "e\u0301",
    "ß",
    "Д",
    "中",
    "ก",
    "🙂",
)
MIXED, MIXED_LENGTH = 300, 24  # texts of such characters, and how many in each
FROM_VOCABULARY = 4000  # tokens; of those that no merge makes, as many again


class Probe(NamedTuple):
    """What a tokenizer makes of a text. decoded: its ids read back, which leaves special tokens out."""

    text: str
    ids: list[int]
    decoded: str


def probes(tokenizer: Tokenizer, texts: Iterable[str]) -> list[Probe]:
    """What `tokenizer` makes of each text."""
    found = []
    for text in texts:
        ids = tokenizer.encode(text)
        found.append(Probe(text, ids, tokenizer.decode(ids)))
    return found


def difference(wanted: Iterable[Probe], tokenizer: Tokenizer) -> str | None:
    """Where `tokenizer` first departs from what another one made of the same texts, in words; None for nowhere."""
    for probe in wanted:
        (found,) = probes(tokenizer, [probe.text])
        if found.ids != probe.ids:
            return f"{probe.text!r:.60} becomes {_short(found.ids)}, not {_short(probe.ids)}"
        if found.decoded != probe.decoded:
            return f"{_short(probe.ids)} is read as {found.decoded!r:.60}, not {probe.decoded!r:.60}"
    return None


def mixed() -> list[str]:
    """Texts of CHARACTERS drawn at random, the same every time: no list of good examples has all that meets."""
    draw = random.Random(6)
    return ["".join(draw.choices(CHARACTERS, k=MIXED_LENGTH)) for _ in range(MIXED)]


def around(tokens: Iterable[str]) -> list[str]:
    """Texts with these tokens alone, within words and beside white space, which some tokens swallow."""
    return [text for token in tokens for text in (token, f"a{token}b", f" {token} \n{token}\n 1", f"{token}{token}")]


def spread(items: Sequence[str], most: int = FROM_VOCABULARY) -> list[str]:
    """At most so many of them, evenly chosen."""
    return list(items[:: -(-len(items) // most)]) if items else []


def _short(ids: list[int]) -> str:
    return f"[{', '.join(map(str, ids[:8]))}{', …' if len(ids) > 8 else ''}]"
