"""A directory of Hugging Face files -> a tokenizer.

tokenizer.json holds the vocabulary, how text is split and what is put around it (`add_bos_token` elsewhere does not
count, as in transformers). The files beside it hold what it lacks: which tokens are BOS and EOS
(tokenizer_config.json, special_tokens_map.json in older directories), which ids end a generation
(generation_config.json, config.json: a number or a list, all are honoured) and the chat template
(chat_template.jinja, or a text or a list of named ones in tokenizer_config.json). Vocabularies without a
tokenizer.json (tokenizer.model, vocab.json + merges.txt) are refused: reading them needs each model's own
conversion code.
"""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from nanokit.errors import TokenizerError
from nanokit.model.tokenizer_parts import TokenizerParts

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_directory(path: str | PathLike[str]) -> TokenizerParts:
    """Build a tokenizer from `path`. Raises TokenizerError, naming the file that is missing or broken."""
    folder = Path(path)
    backend = _backend(folder / "tokenizer.json")
    config = _json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # an older directory, where the map has the last word
        config |= _json(folder / "special_tokens_map.json")
    named = {name: text for name in _NAMED if (text := _text(config.get(name))) is not None}
    _add_tokens(backend, config, named)
    ids = {name: backend.token_to_id(text) for name, text in named.items()}
    return TokenizerParts(
        backend=backend,
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        bos_id=ids.get("bos_token"),
        eos_ids=_end_ids(folder, ids.get("eos_token")),
        chat_template=_chat_template(folder, config),
        special_texts=named,
    )


def _backend(file: Path) -> Backend:
    if not file.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json", "merges.txt") if (file.parent / name).exists()]
        raise TokenizerError(
            "the model directory has no tokenizer.json",
            found=f"{file.parent} with {', '.join(others) or 'no tokenizer files'}",
            needed="tokenizer.json",
            do="download it from the model's page, or write it with transformers: "
            "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)",
        )
    text = _read(file)
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise _broken(file, error, "the format of the tokenizers library") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_tokens(backend: Backend, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Special tokens that only the configuration names: BOS, EOS, … and `additional_special_tokens`."""
    more = [config.get(key) or [] for key in ("additional_special_tokens", "extra_special_tokens")]
    extra = [_text(token) for group in more if isinstance(group, list) for token in group]
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in dict.fromkeys([*named.values(), *extra]) if text and text not in known]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _end_ids(folder: Path, eos_id: int | None) -> tuple[int, ...]:
    """The tokenizer's EOS and all of generation_config.json, or of config.json where that one is missing."""
    file = folder / "generation_config.json"
    if not file.is_file():
        file = folder / "config.json"
    value = _json(file).get("eos_token_id")
    listed = value if isinstance(value, list) else [value]
    if not all(item is None or type(item) is int for item in listed):
        raise _broken(file, f"eos_token_id = {value!r}", "an id or a list of ids")
    return tuple(dict.fromkeys(item for item in (eos_id, *listed) if item is not None))


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the one in tokenizer_config.json; of named ones, the one named `default`."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _read(file)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise _broken(folder / "tokenizer_config.json", f"chat_template = {template!r:.80}", "a text, or named ones")
    return template


def _text(token: object) -> str | None:
    """A token is written as its text or as an object that holds it as `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where the file is missing. Raises TokenizerError for anything else."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise _broken(file, error, "JSON") from error
    if not isinstance(value, dict):
        raise _broken(file, type(value).__name__, "an object")
    return value


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(file, error, "a readable file in UTF-8") from error


def _broken(file: Path, found: object, needed: str) -> TokenizerError:
    return TokenizerError(
        f"{file} cannot be used", found=found, needed=needed, do="download the model's tokenizer files again"
    )
