"""What both packing backends, C and Triton, ask of a model's weights before they pack any."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanokit.model.config import ModelConfig
    from nanokit.model.weights import Matrix, Weights

LANES = 16  # rows of a panel
OLDEST_GPU = (8, 0)  # compute capability: on 7.5 the Triton product does not compile, and attention has no tf32


def fits_four_bits(code_range: tuple[int, int]) -> bool:
    """Whether codes of this range are kept in half a byte."""
    lowest, highest = code_range
    return (lowest >= 0 and highest < 16) or (lowest >= -8 and highest < 8)


def obstacle(config: "ModelConfig", weights: "Weights") -> tuple[str, str | None] | None:
    """Why neither backend can take the model, and what to do about it if something can be; None if both can. Only the
    file's header is looked at."""
    for matrix in matrices(weights):
        coding = matrix.coding
        if coding is None:
            return (
                f"weights of the type {matrix.type} ({matrix.name})",
                "use a file in Q4_0, Q4_1, Q8_0 or a K type, or a policy such as int8-sym-channel, for the fast path",
            )
        if coding.group != 16 and coding.group % 32:
            return f"groups of {coding.group} columns ({matrix.name})", "use groups of 16 or of a multiple of 32"
        if matrix.shape[1] % 32:
            return f"{matrix.shape[1]} columns ({matrix.name}), which are no multiple of 32", None
    if config.head_dim % 16:
        return f"heads of {config.head_dim} dimensions, which are no multiple of 16", None
    return None


def matrices(weights: "Weights") -> list["Matrix"]:
    """Every matrix of a model, the embedding included."""
    layers = [x.weight for w in weights.layers for x in (w.q, w.k, w.v, w.o, w.gate, w.up, w.down)]
    return [*layers, weights.embedding, *([weights.head.weight] if weights.head else [])]


def packed_bytes(weights: "Weights") -> int:
    """What the packed weights will take at most, in bytes: with scales and minimums in fp32, columns in whole 64."""
    total = 0.0
    for matrix in matrices(weights):
        coding, columns = matrix.coding, -(-matrix.shape[1] // 64) * 64
        assert coding is not None  # `obstacle` was asked before
        code = 0.5 if coding.table or fits_four_bits(coding.code_range) else 1
        total += (matrix.shape[0] + LANES - 1) * columns * (code + 8 / coding.group)
    return int(total)
