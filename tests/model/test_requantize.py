"""A policy's weights on their way into every backend, and into files."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import compiled_model, save_tiny, save_tiny_gguf

import nanokit
from nanokit.errors import ModelFileError, NanokitError, ParameterError
from nanokit.model import saved
from nanokit.model.export import interleaved
from nanokit.model.load import open_model
from nanokit.model.quantize import quantize
from nanokit.model.requantize import Requantized, named_roles, requantized
from nanokit.model.source import unpermute
from nanokit.model.weights import find_weights
from nanokit.quant.weight_format import weight_format

POLICIES = (
    "int8-sym-channel",
    "nvfp4",
    "mix:attn=int4-asym-g32,ffn=nf4-dq,head=q8_0;down=mxfp4",
    "q5_0",
    "int4-sym-g32+search",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), compiled_model("llama"))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return save_tiny_gguf(path, compiled_model("llama", tied=True), types="Q8_0")


def logits(path: Path, policy: str | None = None, activations: str = "fp32") -> torch.Tensor:
    from nanokit.lab.experiments.agreement import logits_of

    engine = nanokit.load(path, policy=policy, activations=activations, ctx=128, kv_format="fp32")
    return logits_of(engine, list(range(1, 60)))


def test_the_weights_are_the_formats_own(folder: Path) -> None:
    """A wrapper that hands out the stored weights would make every policy look lossless."""
    source = open_model(folder)
    found = requantized(source, "int4-sym-g32;down=int8-sym-channel;0.q=keep")
    roles = named_roles(find_weights(source.config, source))
    for name, (role, layer) in roles.items():
        plain = source.tensor(name).numpy()
        if (role, layer) == ("q", 0):
            assert np.array_equal(found.tensor(name).numpy(), plain)
            assert found.stored[name] == source.stored[name]
            continue
        names = {"down": "int8-sym-channel", "head": "int8-sym-g32"}
        expected = weight_format(names.get(role, "int4-sym-g32")).quantize(plain)
        assert np.array_equal(found.tensor(name).numpy(), expected.dequantize())
        rows = found.quantized(name, 3, 9)
        assert rows is not None
        assert np.array_equal(rows.dequantize(), expected.dequantize()[3:9])


def test_one_scale_for_q_k_and_v_and_one_for_all(folder: Path) -> None:
    """A scale of its own for each matrix is what `global` is compared with."""
    source = open_model(folder)
    for policy in ("int8-sym-qkv", "int8-sym-global"):
        found = requantized(source, policy)
        scales = {}
        for name, (role, layer) in named_roles(find_weights(source.config, source)).items():
            if role != "head":
                q = found.quantized(name, 0, source.stored[name].shape[0])
                assert q is not None
                assert len(np.unique(q.scales)) == 1
                scales[role, layer] = float(q.scales.flat[0])
        for layer in (0, 1):
            assert scales["q", layer] == scales["k", layer] == scales["v", layer]
        assert (len(set(scales.values())) == 1) == (policy == "int8-sym-global")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_a_file_is_the_policy_loaded(policy: str, kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """What was measured with `policy=` has to be what the written file computes, bit for bit."""
    model = request.getfixturevalue(kind)
    written = quantize(model, tmp_path / "out.safetensors", policy)
    assert written.bits_after < written.bits_before
    assert written.nbytes == (tmp_path / "out.safetensors").stat().st_size
    expected = logits(model, policy)
    assert torch.equal(logits(tmp_path / "out.safetensors"), expected)
    assert not torch.equal(logits(model), expected)


def test_rows_of_a_file_with_nested_scales(folder: Path, tmp_path: Path) -> None:
    """331 blocks: the last rows belong to a second nest, which began before them."""
    quantize(folder, tmp_path / "out.safetensors", "mix:head=nf4-dq")
    name, found = "lm_head.weight", open_model(tmp_path / "out.safetensors")
    expected = weight_format("nf4-dq").quantize(open_model(folder).tensor(name).numpy()).dequantize()
    for first, end in [(0, 331), (10, 20), (250, 300), (300, 331)]:
        rows = found.quantized(name, first, end)
        assert rows is not None
        assert np.array_equal(rows.dequantize(), expected[first:end])
    assert found.stored[name].nbytes == 331 * 33 + 4 * 3


def test_head_and_embedding(folder: Path, gguf: Path) -> None:
    """Floats would keep the whole model from the fast kernels; what has codes already, or was named, stays."""
    assert nanokit.load(folder, policy="int4-sym-g32", ctx=64).model.compiled
    heads = ("model.embed_tokens.weight", "lm_head.weight")
    kept = requantized(open_model(folder), "int4-sym-g32;head=keep")
    assert {kept.stored[name].type for name in heads} == {"F32"}
    named = requantized(open_model(folder), "mix:head=q8_0")
    assert {named.stored[name].type for name in heads} == {"q8_0"}
    assert {requantized(open_model(folder), "keep").stored[name].type for name in heads} == {"F32"}
    assert requantized(open_model(gguf), "int4-sym-g32").stored["token_embd.weight"].type == "Q8_0"


def test_the_c_kernels_run_a_policy(gguf: Path) -> None:
    """The fast path takes every main format: a policy on torch kernels would be slower than no policy."""
    for policy in POLICIES:
        engine = nanokit.load(gguf, policy=policy, ctx=128)
        assert engine.model.compiled, policy
        close = logits(gguf, policy, "a16") - logits(gguf, policy)
        assert close.abs().max() < 2e-3 * logits(gguf, policy).std()


@pytest.mark.parametrize("policy", ["q4_0", "q8_0", "mxfp4", "mix:attn=q5_0,ffn=q4_1", "q4_0+search"])
def test_a_gguf_file_is_the_policy_loaded(policy: str, gguf: Path, tmp_path: Path) -> None:
    """q and k stand in another order in llama files: rows written unpermuted give a plausible wrong model."""
    from gguf import GGUFReader

    quantize(gguf, tmp_path / "out.gguf", policy)
    assert torch.equal(logits(tmp_path / "out.gguf"), logits(gguf, policy))
    fields, before = (GGUFReader(path).fields for path in (tmp_path / "out.gguf", gguf))
    assert set(fields) == {*before, "general.quantization_version"}, "the format wants it beside quantized tensors"
    kept = [name for name in before if name not in ("general.file_type", "GGUF.tensor_count", "GGUF.kv_count")]
    assert all(fields[name].contents() == before[name].contents() for name in kept)


def test_floats_become_a_gguf_file(tmp_path: Path) -> None:
    """The head that nobody named has to become something that GGUF has."""
    model = save_tiny_gguf(tmp_path / "f16.gguf", compiled_model("llama", tied=True), types="F16")
    quantize(model, tmp_path / "out.gguf", "q4_0")
    assert open_model(tmp_path / "out.gguf").stored["token_embd.weight"].type == "Q8_0"
    assert nanokit.load(tmp_path / "out.gguf", ctx=64).model.compiled


@pytest.mark.parametrize("policy", ["int4-sym-g32+awq", "int4-sym-g32+gptq", "int8-sym-channel+smooth"])
def test_a_text_rounds_when_the_first_weight_is_asked_for(policy: str, tmp_path: Path) -> None:
    """Calibrated at once, a wrong option would be refused after minutes. What awq makes of a norm keeps its digits."""
    folder = save_tiny(tmp_path / "tiny", compiled_model("llama").bfloat16())
    calls: list[str] = []
    texts = [list(range(1, 60))]
    found = requantized(open_model(folder), policy, calibration=texts, progress=lambda *at: calls.append(at[2]))
    assert not calls
    saved.write(found, tmp_path / "out.safetensors", policy)
    assert calls.count("rounding layer 1") == 1
    again = open_model(tmp_path / "out.safetensors")
    assert all(torch.equal(again.tensor(name), found.tensor(name)) for name in found.stored)


def test_a_surplus_head_is_left_behind(tmp_path: Path) -> None:
    """A tied model whose file holds the head as well: quantized apart, the two would differ and nothing would load."""
    from safetensors.torch import load_file

    folder = save_tiny(tmp_path / "tiny", compiled_model("llama", tied=True))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    quantize(folder, tmp_path / "out.safetensors", "int4-sym-g32")
    assert torch.equal(logits(tmp_path / "out.safetensors"), logits(folder, "int4-sym-g32"))


def test_weights_that_are_no_numbers_are_named_before_the_text_runs(tmp_path: Path) -> None:
    """Found in the last layer, they cost the whole calibration."""
    from safetensors.torch import load_file

    folder = save_tiny(tmp_path / "tiny", compiled_model("llama"))
    tensors = load_file(folder / "model.safetensors")
    names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)]
    for name in names:
        tensors[name][3, 4] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    calls: list[str] = []
    with pytest.raises(ModelFileError) as caught:
        requantized(open_model(folder), "nvfp4+gptq", progress=lambda *at: calls.append(at[2])).tensor(names[0])
    assert all(name in str(caught.value) for name in names)
    assert not calls


def test_a_large_matrix_is_read_by_rows(gguf: Path, tmp_path: Path) -> None:
    """Restored whole for each piece, the head of a large model would take minutes to pack."""
    quantize(gguf, tmp_path / "m.safetensors", "int8-sym-tensor;down=nvfp4;q=q5_0")
    source = open_model(tmp_path / "m.safetensors")
    for name, stored in source.stored.items():
        if stored.coding:
            whole, part = source.quantized(name, 0, stored.shape[0]), source.quantized(name, 5, 9)
            assert whole is not None
            assert part is not None
            assert np.array_equal(part.dequantize(), whole.dequantize()[5:9])


def test_rows_go_back_into_interleaved_order() -> None:
    """The inverse of `unpermute`, by heads."""
    rows = np.arange(4 * 6 * 5).reshape(24, 5)
    assert np.array_equal(unpermute(torch.from_numpy(interleaved(rows, 4)), 4).numpy(), rows)
    assert not np.array_equal(interleaved(rows, 4), rows)


def test_a_group_that_does_not_divide_is_refused_before_anything_is_read(folder: Path, tmp_path: Path) -> None:
    """Found in the middle of calibration it costs minutes; without names and fitting groups, it costs more."""
    for policy in ("int4-sym-g80", "int4-sym-g80+gptq"):
        with pytest.raises(ParameterError) as caught:
            quantize(folder, tmp_path / "out.safetensors", policy)
        for part in ("q_proj.weight", "64 columns", "g32", "10 matrices"):
            assert part in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written(folder: Path, gguf: Path, tmp_path: Path) -> None:
    """A refusal leaves nothing behind, and an existing file as it is."""
    there = tmp_path / "there.safetensors"
    there.write_bytes(b"mine")
    for model, target, policy, says in (
        (folder, there, "nvfp4", "exists already"),
        (folder, tmp_path / "out.bin", "nvfp4", "says what it becomes"),
        (folder, tmp_path / "out.gguf", "nf4", "nf4 cannot be written into a GGUF file"),
        (gguf, tmp_path / "out.gguf", "int4-sym-g32", "int4-sym-g32 cannot be written into a GGUF file"),
        (gguf, tmp_path / "out.gguf", "auto:8", "auto:8.0 cannot be written into a GGUF file"),
        (gguf, tmp_path / "out.gguf", "nvfp4+gptq", "nvfp4 cannot be written into a GGUF file"),
        (gguf, tmp_path / "out.safetensors", "int4-sym", "unknown weight format"),
    ):
        with pytest.raises(ParameterError, match=says):
            quantize(model, target, policy)
    assert there.read_bytes() == b"mine"
    assert list(tmp_path.iterdir()) == [there]
    for model, part in ((gguf, gguf), (folder, folder / "model.safetensors")):
        with pytest.raises(ParameterError, match="a file of the model itself"):
            quantize(model, part, "q4_0" if model == gguf else "nvfp4", force=True)
    with pytest.raises(NanokitError, match="cannot be written"):
        quantize(folder, tmp_path / "no" / "out.safetensors", "nvfp4")
    with pytest.raises(ParameterError, match="stay in their file"):
        nanokit.load(gguf, policy="nvfp4", mapped=True)
    quantize(folder, there, "nvfp4", force=True)
    assert there.stat().st_size > 4


def test_a_crash_while_writing_leaves_the_old_file(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-written model under the right name would be loaded."""
    for name in ("out.safetensors", "out.gguf"):
        target = tmp_path / name
        target.write_bytes(b"old")

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", interrupted)
            with pytest.raises(KeyboardInterrupt):
                quantize(gguf, target, "q4_0", force=True)
        assert target.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf", "out.safetensors"]


def test_a_quantized_file_is_quantized_again(gguf: Path, tmp_path: Path) -> None:
    """A file of ours is a model like any other."""
    quantize(gguf, tmp_path / "a.safetensors", "int8-sym-g32")
    quantize(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "int4-sym-g32")
    with pytest.raises(ParameterError, match="cannot become a GGUF file"):
        quantize(tmp_path / "a.safetensors", tmp_path / "b.gguf", "q4_0")
    source = requantized(open_model(gguf), "int8-sym-g32")
    twice = Requantized.matrix(requantized(source, "int4-sym-g32"), "blk.0.ffn_up.weight")  # type: ignore[arg-type]
    found = open_model(tmp_path / "b.safetensors").tensor("blk.0.ffn_up.weight")
    assert np.array_equal(found.numpy(), twice.dequantize())


def _rewritten(path: Path, change: dict) -> Path:
    """The file with another header, or with tensors changed."""
    with safe_open(path, "pt") as handle:
        tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
        metadata = handle.metadata()
    header = json.loads(metadata["nanokit"])
    out = path.with_name("broken.safetensors")
    save_file(tensors | change.get("tensors", {}), out, {"nanokit": json.dumps(header | change.get("header", {}))})
    return out


def test_damaged_files_are_refused(folder: Path, tmp_path: Path) -> None:
    """Whatever the header says is checked before arithmetic trusts it; nothing but known files is written out."""
    path = tmp_path / "good.safetensors"
    quantize(folder, path, "int4-sym-g32")
    name = "model.layers.0.mlp.up_proj.weight"
    entries = json.loads(safe_open(path, "pt").metadata()["nanokit"])["entries"]

    def with_entry(**change: object) -> dict:
        return {"header": {"entries": entries | {name: entries[name] | change}}}

    for change, says in (
        ({"header": {"schema": "other/1"}}, "schema"),
        ({"header": {"files": {"../evil.json": "{}"}}}, "no other files"),
        ({"header": {"files": {"config.json": "[1]"}}}, "damaged"),
        ({"header": {"entries": {}}}, "arrays of its entries"),
        (with_entry(group=-32), "numbers that fit"),
        (with_entry(group=7), "numbers that fit"),
        (with_entry(shape=[96, 10**12]), "wrong shape|numbers that fit"),
        (with_entry(tensor_scale=float("inf")), "damaged"),
        (with_entry(format="int3"), "unknown weight format"),
        (with_entry(scales="f8"), "numbers that fit"),
        (with_entry(code_range=[-8, 7]), "is not what int4-sym-g32 is"),
        (with_entry(group=16), "is not what int4-sym-g32 is"),
        (with_entry(format="int4-asym-g32", code_range=[0, 15]), "minimums"),
        (with_entry(tensor_scale=10**400), "damaged"),
        ({"tensors": {name + "::scales": torch.zeros(96, 2, dtype=torch.bfloat16)}}, "arrays of its entries"),
        ({"tensors": {name + "::minimums": torch.zeros(96, 2, dtype=torch.float16)}}, "has minimums"),
        ({"tensors": {"extra::codes": torch.zeros(3)}}, "arrays of its entries"),
        ({"tensors": {"extra": torch.zeros(3)}}, "does not use"),
    ):
        with pytest.raises(ModelFileError, match=says):
            nanokit.load(_rewritten(path, change), ctx=64)
    damaged = _rewritten(path, {"tensors": {name + "::codes": torch.full((96, 32), 0x88, dtype=torch.uint8)}})
    with pytest.raises(ModelFileError, match="codes that int4-sym-g32 does not have"):
        nanokit.load(damaged, ctx=64)
    save_file({"a": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    with pytest.raises(ModelFileError, match="not a model of its own"):
        open_model(tmp_path / "foreign.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match="cannot be read as safetensors"):
        open_model(path)


def test_a_plain_reader_opens_the_file(folder: Path, tmp_path: Path) -> None:
    """Formats stand in plain JSON, arrays under plain names: no code of ours is needed to look into one."""
    quantize(folder, tmp_path / "m.safetensors", "int4-asym-g32")
    with safe_open(tmp_path / "m.safetensors", "pt") as handle:
        header = json.loads(handle.metadata()["nanokit"])
        name = "model.layers.1.mlp.gate_proj.weight"
        packed, scales, minimums = (handle.get_tensor(f"{name}::{part}") for part in ("codes", "scales", "minimums"))
    assert header["schema"] == saved.SCHEMA
    assert header["entries"][name]["format"] == "int4-asym-g32"
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).float()
    wide = [part.float().repeat_interleave(32, 1) for part in (scales, minimums)]
    plain = weight_format("int4-asym-g32").quantize(open_model(folder).tensor(name).numpy()).dequantize()
    assert np.array_equal((codes * wide[0] + wide[1]).numpy(), plain)
