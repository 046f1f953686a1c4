"""The parameters of the notebook on ranges, and the policies that it compares."""

from dataclasses import dataclass

from nanokit.lab.params import Params, experiment_params, knob
from nanokit.lab.result import Result

# Short names, since a parameter's line in a notebook takes no equals sign; the grammar is quant/policy.py's.
POLICIES = {
    "keep": "keep",
    "global": "int4-sym-global",
    "qkv": "int4-sym-qkv",
    "tensor": "int4-sym-tensor",
    "channel": "int4-sym-channel",
    "g192": "int4-sym-g192",
    "g64": "int4-sym-g64",
    "g32": "int4-sym-g32",
    "asym-g32": "int4-asym-g32",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "nf4": "nf4",
    "int8-tensor": "int8-sym-tensor",
    "int8-channel": "int8-sym-channel",
    "int8-g64": "int8-sym-g64",
    "account": "mix:attn=int4-sym-channel,ffn=int4-sym-g64",
    "account-g32": "mix:attn=int4-sym-channel,ffn=int4-sym-g32",
    "attn-tensor": "keep;attn=int4-sym-tensor",
    "attn-channel": "keep;attn=int4-sym-channel",
    "attn-g64": "keep;attn=int4-sym-g64",
    "ffn-tensor": "keep;ffn=int4-sym-tensor",
    "ffn-channel": "keep;ffn=int4-sym-channel",
    "ffn-g64": "keep;ffn=int4-sym-g64",
}
SMOKE = ["global", "g64", "account"]
QUICK = [
    "keep", "global", "tensor", "g64", "asym-g32", "nvfp4", "nf4", "account", "attn-tensor", "attn-channel",
    "int8-tensor", "int8-g64",
]  # fmt: skip
FORMATS = (
    "int4-sym-tensor", "int4-sym-channel", "int4-sym-g192", "int4-sym-g64", "int4-sym-g32", "int4-asym-g64",
    "int4-asym-g32", "nvfp4", "mxfp4", "nf4", "q4_0", "q4_1", "int8-sym-tensor", "int8-sym-channel", "int8-sym-g64",
)  # fmt: skip
ROLES = ("q", "k", "v", "o", "gate", "up", "down")
PROSE, ARITHMETIC = "evaluation", "arithmetic"  # texts of data/texts
EXACT_DB = 150.0  # stands for equality: fp32 has no finer noise to show


@experiment_params
class RangeParams(Params):
    """Which weights are looked at, and what is done to them."""

    model: str = knob("", "GGUF file, folder of safetensors or hub name; empty is the default model")
    settings: list[str] = knob(
        [], "policies whose damage is measured", choices=tuple(POLICIES),
        by_preset={"smoke": SMOKE, "quick": QUICK, "full": list(POLICIES)},
    )  # fmt: skip
    formats: list[str] = knob(
        [], "formats by which single matrices are rounded", choices=FORMATS,
        by_preset={"smoke": ["int4-sym-tensor", "int4-sym-g64", "int4-asym-g32"], "quick": list(FORMATS),
                   "full": list(FORMATS)},
    )  # fmt: skip
    layers: int = knob(
        0, "layers whose weights are looked at one by one, spread over the model", unit="layers", low=1, high=200,
        by_preset={"smoke": 1, "quick": 3, "full": 200},
    )  # fmt: skip
    windows: int = knob(
        0, "windows of prose, half of each is scored; and half as many of arithmetic, but one", unit="windows", low=1,
        high=64, by_preset={"smoke": 1, "quick": 2, "full": 8},
    )  # fmt: skip
    length: int = knob(
        0, "of a window", unit="tokens", low=32, high=2048, by_preset={"smoke": 64, "quick": 144, "full": 512}
    )
    repeats: int = knob(0, "rounds of timing", low=2, high=50, by_preset={"smoke": 2, "quick": 3, "full": 15})


@dataclass(frozen=True)
class RangeResult(Result):
    """A Result of RangeParams."""

    @property
    def asked(self) -> RangeParams:
        assert isinstance(self.params, RangeParams)
        return self.params
