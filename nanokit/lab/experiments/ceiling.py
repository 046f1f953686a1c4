"""How fast products of the engine's kind are when no weight has to come from memory: the roofline's flat part."""

from collections.abc import Callable

import torch

from nanokit.engine.load import LoadedEngine
from nanokit.kernels.cpu.ops import Linear
from nanokit.lab.bench.timing import milliseconds
from nanokit.lab.experiments.product import TorchLinear, random_weights
from nanokit.model.config import ModelConfig

ROWS = 512  # a prefill
WEIGHTS = 1 << 20  # at most so many: in 4 bits they stay in a core's second cache
LAYOUT = "int4-asym-g32"  # codes, scales and minimums as in Q4_1, the default model's format
ANY_COLUMNS = "int8-sym-channel"  # torch multiplies floats, whatever they come from


def weights_of(config: ModelConfig) -> tuple[int, int]:
    """Weights that a row is multiplied with: in all layers, and in the head. Norms and biases are not counted."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * queries + 2 * keys)
    feed_forward = 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * (attention + feed_forward), config.vocab_size * config.hidden_size


def ceiling_of(engine: LoadedEngine) -> Callable[[int], list[float]]:
    """A function of `repeats` that returns 1e9 operations a second, one sample a repeat: ROWS rows times one
    feed-forward matrix of the engine's model (cut to WEIGHTS weights), again and again, by the kernels and in the
    activation mode of the engine."""
    columns = engine.model.config.hidden_size
    rows = min(engine.model.config.intermediate_size, WEIGHTS // columns)
    x = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(0))
    product: Linear | TorchLinear
    if engine.model.compiled:
        product = Linear(random_weights(LAYOUT, rows, columns))
    else:
        product = TorchLinear(random_weights(ANY_COLUMNS, rows, columns))
    mode, peak = engine.model.activations, float(x.abs().max())
    operations = 2 * ROWS * rows * columns

    def measured(repeats: int) -> list[float]:
        with torch.inference_mode():
            product(x, mode, peak)
            return [operations / milliseconds(lambda: product(x, mode, peak)) / 1e6 for _ in range(repeats)]

    return measured
