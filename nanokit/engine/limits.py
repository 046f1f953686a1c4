"""What a request may ask of an engine: refused with numbers, before anything is allocated."""

from collections.abc import Sequence
from operator import index

from nanokit.engine.config import EngineConfig
from nanokit.engine.interfaces import CausalModel, TextTokenizer
from nanokit.engine.sampling import Sampling
from nanokit.errors import ParameterError, RequestError


def prompt_ids(prompt: object, tokenizer: TextTokenizer, vocab_size: int) -> list[int]:
    """The ids of a prompt, given as text or as ids. Raises RequestError for anything else, and when it is
    empty."""
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt) if prompt else []
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        ids = _integers(prompt)
    else:
        raise RequestError(
            "a prompt is text or a list of token ids",
            found=f"{type(prompt).__name__}: {prompt!r:.60}",
            needed="str, or a sequence of integers",
            do="decode bytes first; put each prompt into a list: generate([prompt])",
        )
    if not ids:
        raise RequestError(
            "the prompt is empty",
            found=f"{prompt!r}",
            needed="at least one token",
            do="give some text, or the id of the token to begin with",
        )
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise RequestError("a token id is outside the vocabulary", found=outside[0], needed=f"0 … {vocab_size - 1}")
    return ids


def _integers(prompt: Sequence[object]) -> list[int]:
    for item in prompt:
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            raise RequestError(
                "a prompt of token ids holds something else",
                found=f"{type(item).__name__}: {item!r:.60}",
                needed="integers only",
                do="put each text prompt into a list of its own: generate([text, text])",
            )
    return [index(item) for item in prompt]  # type: ignore[arg-type]


def check_sampling(sampling: object, vocab_size: int) -> None:
    """Raise RequestError for token ids that do not exist, or when no token would be left."""
    if not isinstance(sampling, Sampling):
        raise RequestError(
            "sampling settings are a Sampling object",
            found=f"{type(sampling).__name__}: {sampling!r:.60}",
            needed="nanokit.Sampling(...)",
        )
    outside = [token for token in sampling.suppress if token >= vocab_size]
    if outside:
        raise RequestError(
            "a suppressed id is outside the vocabulary", found=outside[0], needed=f"0 … {vocab_size - 1}"
        )
    if len(set(sampling.suppress)) == vocab_size:
        raise RequestError(
            "no token is left to draw: all are suppressed",
            found=f"{vocab_size} ids",
            needed="at least one that is not",
            do="shorten `suppress`",
        )


def own_mode(sampling: Sampling, model: CausalModel) -> str | None:
    """The activation mode that a request asks for; None where it is the model's own, but for "tensor", which requests
    name (Request.sharable). Raises RequestError for one that the model cannot run, or cannot run yet (static without
    peaks)."""
    mode = sampling.activations or model.activations
    if mode == model.activations != "tensor":
        return None
    try:
        model.in_mode(mode)
    except ParameterError as error:
        what = f"this engine cannot compute a request in {mode} activations: {error.what}"
        raise RequestError(what, found=error.found, needed=error.needed, do=error.do) from error
    return mode


def check_size(prompt_len: int, sampling: Sampling, config: EngineConfig) -> None:
    """Raise RequestError when a request is longer than the context or could not run even alone.

    The last token of an answer is drawn but never computed, so it needs no KV.
    """
    if prompt_len >= config.max_context:
        raise RequestError(
            "the prompt is longer than the context allows",
            found=f"{prompt_len} tokens",
            needed=f"at most {config.max_context - 1}, so that one more fits into the context of {config.max_context}",
            do="shorten the prompt, or load the model with a larger ctx",
        )
    computed = min(prompt_len + sampling.max_tokens, config.max_context) - 1
    blocks = -(-computed // config.block_size)
    if blocks > config.num_blocks:
        raise RequestError(
            "the request can never fit into the KV pool",
            found=f"{prompt_len} prompt tokens and up to {sampling.max_tokens} new ones: {blocks} blocks of "
            f"{config.block_size}",
            needed=f"at most {config.num_blocks} blocks ({config.num_blocks * config.block_size} tokens)",
            do="lower max_tokens or shorten the prompt, or load the model with a larger kv_memory",
        )
