"""Texts on which tokenizers tend to differ, and small tokenizers to try them on."""

from typing import Any

TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n",
    " \n \t\n",
    "Hello, world!",
    " Hello",
    "  Hello   there  ",
    "Hello\n\n1. one\n2. two\n\n\n10) ten",
    "a  12   345 6789 3.14159 1,000,000 ½ ² ٣٤ 一二三",
    "don't I'LL we've THEY'RE it's 'quoted' ’s",
    "Größe, naïve café, Ærø, straße, İstanbul",
    "Ça va? ¿Qué tal? Où est l'été?",
    "Привет, как дела? Чай с молоком.",
    "你好，世界！今天天气很好。",
    "こんにちは世界。カタカナとひらがな、漢字。",
    "안녕하세요 세계",
    "नमस्ते दुनिया",
    "مرحبا بالعالم",
    "שלום עולם",
    "สวัสดีชาวโลก",
    "e\u0301 vs \u00e9, ﬁ ligature, Ω",
    "🙂 👩‍👩‍👧‍👦 🇩🇪 🏳️‍🌈 👍🏽 text🙂text",
    "def f(x):\n    return {k: v**2 for k, v in x.items()}  # comment\n\tif x:\n\t\tpass\n",
    'int main(void) {\n  printf("%d\\n", 0x7fff);\n  return a->b[3] & ~1;\n}\r\n',
    "SELECT * FROM t WHERE a<=10 AND b!='x';",
    "https://example.org/path?q=1&r=2#frag user@example.org",
    '<p class="x">Hi &amp; bye</p>',
    "x = 1\u00a0000\u2003wide\u200bzero\ufeffbom",
    "!!!???...---===+++***___~~~```$$$%%%^^^&&&",
    "\x00\x01\x7f control \x1b[0m",
    "a" * 300,
    " " * 40 + "x" + "\t" * 9 + "y",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "The quick brown fox jumps over the lazy dog. " * 5,
]

SPECIAL_TEXTS = [
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|im_start|>system\nYou are 2 wise.<|im_end|>\n<|im_start|>user\n3 + 4?<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|>",
    "a<|endoftext|>b",
    " <|endoftext|> b",
    "<|im_start|><|im_end|><|endoftext|>",
    "<|im_start |> <im_start> <|im_end|",
    "<file_sep><repo_name>x<filename>y.py<gh_stars>5",
]

CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12 x 12?"}],
    [
        {"role": "user", "content": " leading and trailing \n"},
        {"role": "assistant", "content": "ok 🙂"},
        {"role": "user", "content": "<|im_end|> inside"},
    ],
]


def byte_level_metadata(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    """A GGUF vocabulary of 256 bytes, some merges and four added tokens; changes: keys of tokenizer.ggml."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "Ċ Ċ", "Ã ©"]
    tokens = [
        *alphabet,
        *(merge.replace(" ", "") for merge in merges),
        "<|begin|>",
        "<|im_end|>",
        "<think>",
        "[PAD]",
    ]
    values = {
        "model": "gpt2", "pre": pre, "tokens": tokens, "merges": merges,
        "token_type": [1] * (len(tokens) - 4) + [3, 3, 4, 5],
        "bos_token_id": tokens.index("<|begin|>"), "eos_token_id": tokens.index("<|im_end|>"), **changes,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """A GGUF vocabulary as SentencePiece BPE trains it: byte tokens, scored pieces, no merges."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["he", "ll", "hel", "hell", "hello", "▁hello", "lo", "▁w", "or", "▁wor", "ld", "▁world", "▁▁"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz", ".", "é"]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces, *letters, "<|end|>", "<tool>"]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces) + len(letters))] + [0.0, 0.0]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(letters)) + [3, 4]
    values = {
        "model": "llama", "pre": "default", "tokens": tokens, "scores": scores, "token_type": types,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **changes,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
