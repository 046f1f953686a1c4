"""The model as the engine sees it: one ragged forward, and a head.

Prefill chunks, decode and verification are one call over a batch of flattened tokens. The layers themselves live in
a kernel backend, which packs the weights once (`bind`), resolves a step once (`plan`) and then runs it in one call.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor

from nanokit.errors import ParameterError, naming
from nanokit.kernels import cpu, reference
from nanokit.kernels.activations import MODES, no_peaks, not_calibrated, note_peak, place_name
from nanokit.kernels.packable import packed_bytes
from nanokit.model.batch import Batch
from nanokit.model.config import ModelConfig
from nanokit.model.head import FullHead, HeadProduct
from nanokit.model.source import ModelSource, footprint
from nanokit.model.weights import Weights, find_weights

DEVICES = ("cpu", "cuda", "interpreter")

# What the C kernels and the Triton kernels run unless told otherwise. a16 loses nothing that a text shows and costs
# little at one row, but its second plane is arithmetic that verification, batches and prefill wait for; what a8g32
# loses is small beside what 4-bit weights have lost already, and llama.cpp keeps activations alike. The notebook
# 01_roofline measures both.
DEFAULT_ACTIVATIONS = "a8g32"

Observer = Callable[[str, Tensor, Tensor], None]


class BoundModel(HeadProduct, Protocol):
    """What `bind` of a backend returns. variant: what the kernels are called in records. peaks: noted instead of
    used, see kernels/activations.py."""

    variant: str
    peaks: Tensor | None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that one decoded token reads."""
        ...

    def in_mode(self, mode: str) -> "BoundModel": ...

    def plan(self, batch: Batch, pages: Any) -> Any: ...

    def run(self, plan: Any, peaks: Tensor | None = None) -> Tensor: ...

    def calibrate(self, peaks: Tensor) -> None: ...

    def stream(self) -> float:
        """Seconds to read those bytes and do nothing else."""
        ...


class OpenedModel:
    """An opened source whose weights have been found and not been read, and how it is going to run.

    activations: the mode; None takes the packing kernels' default where they can run the model, else fp32. resident:
    False leaves the layers in their file. device: one of `DEVICES`; for "cuda", and "interpreter", which runs the same
    kernels without a GPU, nothing stands in. Raises ModelFileError, ParameterError, NoGpuError.
    """

    def __init__(
        self,
        source: ModelSource,
        config: ModelConfig,
        activations: str | None = None,
        *,
        resident: bool = True,
        device: str = "cpu",
    ) -> None:
        for what, value, known in (("activation mode", activations, (None, *MODES)), ("device", device, DEVICES)):
            if value not in known:
                needed = "one of " + ", ".join(each for each in known if each)
                raise ParameterError(f"unknown {what}", found=repr(value), needed=needed)
        self.source, self.config, self.resident, self.on_gpu = source, config, resident, device != "cpu"
        with naming(source.name):
            self.weights: Weights = find_weights(config, source)
        if self.on_gpu:
            self._check_gpu(device)
        self.fallback = None if activations == "fp32" or self.on_gpu else self._fallback()
        self.compiled = activations != "fp32" and self.fallback is None and not self.on_gpu
        packed = self.compiled or self.on_gpu
        self.activations = activations or (DEFAULT_ACTIVATIONS if packed else "fp32")

    def _check_gpu(self, device: str) -> None:
        from nanokit.kernels import gpu  # a fifth of a second that a CPU does without

        if not self.resident:
            raise ParameterError(
                "layers cannot stay in their file on a GPU", found=f"mapped with device={device!r}",
                do='leave out mapped, or use device="cpu"',
            )  # fmt: skip
        gpu.require(device)
        gpu.check(self.config, self.weights)

    def _fallback(self) -> cpu.NoKernelsError | None:
        try:
            cpu.check(self.config, self.weights, self.resident)
        except cpu.NoKernelsError as error:
            return error
        return None

    @property
    def device(self) -> torch.device:
        """Where KV pages have to lie."""
        if not self.on_gpu:
            return torch.device("cpu")
        from nanokit.kernels.gpu import runtime

        return runtime.device()

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights will take, on the device."""
        if self.compiled or self.on_gpu:
            return packed_bytes(self.weights)
        sizes = footprint(self.source)
        return sizes.dense if self.resident else sizes.mapped

    def bind(self) -> BoundModel:
        """Read and bind the weights. Says so once when the reference has to stand in for the C kernels, and when an
        interpreter is asked for."""
        if self.on_gpu:
            from nanokit.kernels import gpu

            if self.device.type != "cuda":
                warnings.warn(
                    f"{self.source.name} runs in Triton's interpreter, which is there to read and test the GPU's "
                    "kernels: a token of a real model takes it minutes",
                    stacklevel=2,
                )  # fmt: skip
            return gpu.bind(self.config, self.weights, activations=self.activations)
        if self.compiled:
            return cpu.bind(self.config, self.weights, activations=self.activations)
        if self.fallback is not None and self.resident and not self.fallback.by_request:
            advice = f"; {self.fallback.do}" if self.fallback.do else ""
            warnings.warn(
                f"{self.source.name} runs on the slower torch kernels ({self.fallback.what}{advice})", stacklevel=2
            )
        return reference.bind(self.config, self.weights, self.resident, activations=self.activations)


class Transformer:
    """Bound weights and the head. activations: the mode it runs in; compiled: by the C kernels; device: where hidden
    states and KV pages lie; name and footprint are those of the source it was read from.

    One set of weights serves every activation mode that its kernels have: `in_mode` gives a model that shares all but
    the mode.
    """

    def __init__(self, opened: OpenedModel) -> None:
        """Read the weights. Raises ModelFileError for one that is not a number."""
        self.config, self.activations, self.compiled = opened.config, opened.activations, opened.compiled
        self.device = opened.device
        self.name, self.footprint = opened.source.name, footprint(opened.source)
        self.vocab_size = opened.config.vocab_size
        with naming(self.name):
            self._bound = opened.bind()
        self.kernels = self._bound.variant  # "avx512", …, "triton"; "torch" is the reference
        self.head = FullHead(self._bound, self.vocab_size)
        # Of the modes asked for; one dict that the model in all its modes shares, so that peaks have one place.
        self._by_mode = {self.activations: (self._bound, self.head)}
        self._observers: list[Observer] = []  # one list for the model in all its modes

    def in_mode(self, mode: str) -> "Transformer":
        """The same weights in another activation mode; nothing is copied. Raises ParameterError for a mode that the
        kernels lack, columns that its groups do not divide, and static before `calibrate`."""
        found = self._in_mode(mode)
        if mode == "static" and found.peaks is None:
            raise not_calibrated()
        return found

    def _in_mode(self, mode: str) -> "Transformer":
        if mode not in self._by_mode:
            bound = self._bound.in_mode(mode)
            self._by_mode[mode] = bound, FullHead(bound, self.vocab_size)
        other = copy(self)
        (other._bound, other.head), other.activations = self._by_mode[mode], mode
        return other

    def forward(self, batch: Batch, pages: Any) -> Tensor:
        """Hidden states after the final norm, [rows, hidden_size]; the keys and values of the batch's tokens are in
        the pages afterwards. Raises ValueError for a batch that would read or write where it must not."""
        batch.check(vocab_size=self.vocab_size, num_blocks=pages.num_blocks, block_size=pages.block_size)
        plan = self._bound.plan(batch, pages)
        return self._observed(batch, plan) if self._observers else self._bound.run(plan)

    @contextmanager
    def observing(self, observe: Observer) -> Iterator[None]:
        """Show every input of a product, in whatever mode, as long as the context lasts: observe(place, x, positions)
        with the place's name, x fp32 [rows, columns] before it is quantized, and each row's position in its sequence.

        Only the reference kernels show them, whatever modes they compute (`load(..., activations="fp32")`): raises
        ParameterError for others, which tell no more than peaks.
        """
        if not isinstance(self._bound, reference.Bound):
            raise ParameterError(
                "these kernels do not show what their products see",
                found=self.kernels,
                needed="the reference kernels",
                do='load the model with activations="fp32", and give requests the mode that is of interest',
            )
        self._observers.append(observe)
        try:
            yield
        finally:
            self._observers.remove(observe)

    def _observed(self, batch: Batch, plan: Any) -> Tensor:
        spans = zip(batch.query_lens, batch.kv_lens, strict=True)
        positions = torch.cat([torch.arange(kv_len - query_len, kv_len) for query_len, kv_len in spans])
        layers = self.config.num_layers

        def seen(place: int, x: Tensor) -> None:
            for observe in self._observers:
                observe(place_name(place, layers), x, positions)

        assert isinstance(self._bound, reference.Bound)
        hidden = self._bound.run(plan, observe=seen)
        seen(4 * layers, hidden)
        return hidden

    def peaks_of(self, batch: Batch, pages: Any) -> Tensor:
        """The largest magnitude at each place (kernels/activations.py) in one forward over `batch`, as exactly as the
        kernels can compute it: fp32 [4 * layers + 1]."""
        peaks = no_peaks(self.config.num_layers)
        hidden = self._bound.run(self._bound.plan(batch, pages), peaks)
        note_peak(peaks, 4 * self.config.num_layers, hidden)
        return peaks

    def calibrate(self, peaks: Tensor) -> None:
        """Set the peaks of static activations, of this model and of what `in_mode` gives. Raises ParameterError for
        peaks that are not this model's, and for kernels that cannot run static."""
        self._in_mode("static")._bound.calibrate(peaks)

    @property
    def peaks(self) -> Tensor | None:
        """Of static activations; None before `calibrate`."""
        return self._in_mode("static")._bound.peaks

    @property
    def bytes_per_token(self) -> int:
        """Bytes of weights that one decoded token reads, in the form in which they are in memory."""
        return self._bound.bytes_per_token

    def stream(self) -> float:
        """Seconds to read these bytes once with the threads of a step: the limit of a decoded token."""
        return self._bound.stream()
