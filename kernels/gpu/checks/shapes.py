"""Shapes of models that speeds are measured in: facts of the published config.json of each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """heads, kv_heads: of queries, and of keys and values; dim: of a head; vocab: tokens."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Outputs and columns of what differs in shape: v is as k, up as gate, and o nearly as q."""
        return {
            "gate": (self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "q": (self.heads * self.dim, self.hidden),
            "k": (self.kv_heads * self.dim, self.hidden),
        }


SHAPES = {
    "7B": Shape("Qwen2-7B", 3584, 18944, 28, 4, 128, 152064),
    "0.6B": Shape("Qwen3-0.6B", 1024, 3072, 16, 8, 128, 151936),
    "32B": Shape("Qwen2.5-32B", 5120, 27648, 40, 8, 128, 152064),
}
TINY = {"tiny": Shape("none", 64, 96, 2, 1, 16, 300)}
