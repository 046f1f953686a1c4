"""The sizes of one engine."""

from typing import Annotated

from pydantic import Field

from nanokit.engine.settings import settings
from nanokit.errors import ParameterError

Positive = Annotated[int, Field(ge=1)]


@settings
class EngineConfig:
    """Sizes. Raises ParameterError when one is unknown or out of range.

    max_context: tokens of prompt and answer together. num_blocks: KV blocks of block_size tokens. max_seqs:
    sequences that run at once. token_budget: tokens computed in one step, at least max_seqs. prefix_cache:
    reuse the KV of prompts that begin alike.
    """

    max_context: Positive
    num_blocks: Positive
    block_size: Positive = 64
    max_seqs: Positive = 16
    token_budget: Positive = 512
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        if self.token_budget < self.max_seqs:
            raise ParameterError(
                "EngineConfig: every running sequence must get a token in every step",
                found=f"token_budget {self.token_budget}, max_seqs {self.max_seqs}",
                needed="token_budget >= max_seqs",
            )
