"""Peers: compared on equal terms, missing ones said by name, and a Q4_0 copy that is what it says."""

import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from tiny import save_tiny, tiny_model

from nanokit.engine.load import load
from nanokit.engine.sampling import Sampling
from nanokit.errors import ParameterError
from nanokit.gguf.reader import GGUFFile
from nanokit.lab import lock
from nanokit.lab.bench import common, peer_llamacpp, peers, prefill, requantize
from nanokit.lab.bench.decode import DecodeParams, decode
from nanokit.lab.bench.limit import BenchError
from nanokit.lab.bench.peer_transformers import TransformersPeer
from nanokit.lab.bench.workload import prompt_ids
from nanokit.quant.formats import dequantize


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("peers") / "tiny", tiny_model("llama"))


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "lock_path", lambda: tmp_path / "measuring.lock")
    monkeypatch.setenv("NANOKIT_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_that_is_not_installed_is_said_before_anything_is_loaded(name, monkeypatch) -> None:
    """A comparison that silently lacks a column would be read as "not asked for"."""
    monkeypatch.setitem(peers.MODULES, name, "no_such_package_of_ours")
    monkeypatch.setattr(common, "load_for", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(BenchError, match=f"{name} is not installed") as error:
        decode(DecodeParams(preset="smoke", peer=[name]))
    assert "pip install" in str(error.value)


def test_transformers_decodes_the_same_tokens_at_every_visit(tiny: Path) -> None:
    """Its cache is cropped back between visits: one token too many or too few would change the answer, and the
    context length that is timed."""
    engine = load(tiny, ctx=256, prefix_cache=False, activations="fp32")
    ids = prompt_ids(engine, 70)
    expected = engine.generate([ids], Sampling(max_tokens=6, ignore_eos=True))[0].token_ids
    peer = TransformersPeer(tiny, 1)
    for _ in range(2):
        peer.begin(ids)
        found = []
        for _ in range(6):
            found.append(int(peer._last))
            peer.step()
        assert found == expected
        assert peer._cache.get_seq_length() == 70 + 6


def test_peers_take_turns_with_us_in_one_run(tiny: Path) -> None:
    """The whole path with a real peer: both series, as many samples, and the ratio."""
    engine = load(tiny, ctx=512, prefix_cache=False, activations="fp32")
    result = decode(DecodeParams(model=str(tiny), preset="smoke", steps=3, peer=["transformers"]), engine=engine)
    assert len(result.samples["peer_transformers_ms_at_64"]) == len(result.samples["step_ms_at_64"]) == 2 * 3
    assert result.settings["peers"] == ["transformers"]
    assert result.metrics["vs_transformers"] > 0
    p = prefill.PrefillParams(model=str(tiny), preset="smoke", peer=["transformers"])
    assert prefill.prefill(p, engine=engine).metrics["vs_transformers"] > 0


def test_peers_run_the_engines_own_file(tiny: Path, monkeypatch) -> None:
    """An engine handed in without the name of its file was compared with peers on the default model."""
    monkeypatch.setattr(common, "_default_model", lambda: "/models/default.gguf")
    engine = load(tiny, ctx=256, prefix_cache=False, activations="fp32")
    with pytest.raises(ParameterError, match="another file"):
        decode(DecodeParams(preset="smoke", peer=["transformers"]), engine=engine)


def test_llama_cpp_that_dies_of_a_signal_is_an_error(tmp_path: Path, monkeypatch) -> None:
    """A build with instructions that the machine forbids kills the process: the whole run would vanish with it."""
    monkeypatch.setattr(peer_llamacpp, "TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(BenchError, match="does not run on this machine") as error:
        peer_llamacpp.LlamaCppPeer(tmp_path / "any.gguf", "Q4_1", 2, 64)
    assert "signal 11" in str(error.value)


def test_llama_cpp_cannot_read_a_folder(tiny: Path) -> None:
    with pytest.raises(BenchError, match="GGUF"):
        requantize.main_type(tiny)


def test_a_q4_1_file_is_compared_in_both_types_on_their_own_files(tmp_path: Path, monkeypatch) -> None:
    """nanokit must run on the Q4_0 copy as well: its 4.5 bits are fewer bytes than Q4_1's 5."""
    opened: list[tuple[str, str]] = []
    fake = SimpleNamespace(
        LlamaCppPeer=lambda file, kind, threads, longest: opened.append((file.name, kind)) or SimpleNamespace(name=kind)
    )
    monkeypatch.setitem(sys.modules, "nanokit.lab.bench.peer_llamacpp", fake)
    monkeypatch.setattr(peers, "_engine_like", lambda engine, file: file.name)
    source = write_model(tmp_path / "small.gguf")
    rivals = peers.open_rivals(["llama-cpp"], source, None, 2, 64)
    copy = requantize.q4_0_copy(source)
    assert opened == [("small.gguf", "Q4_1"), (copy.name, "Q4_0")]
    assert [rival.engine for rival in rivals] == [None, copy.name]
    opened.clear()
    assert [rival.engine for rival in peers.open_rivals(["llama-cpp"], copy, None, 2, 64)] == [None]
    assert opened == [(copy.name, "Q4_0")]


def write_model(path: Path) -> Path:
    """Not a model that runs: matrices of three types, a norm, and metadata of every shape."""
    generator = np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_float32("llama.rope.freq_base", 12345.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ü", "<s>"])
    writer.add_array("tokenizer.ggml.token_type", [1, 1, 3])
    for name, kind, shape in (
        ("token_embd.weight", "Q8_0", (3, 64)),
        ("blk.0.attn_q.weight", "Q4_1", (8, 64)),
        ("blk.0.ffn_down.weight", "Q4_1", (64, 96)),
        ("blk.0.attn_norm.weight", "F32", (64,)),
    ):
        values = generator.normal(size=shape).astype(np.float32)
        qtype = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(values, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_copy_has_q4_0_matrices_and_everything_else_unchanged(tmp_path: Path) -> None:
    source = write_model(tmp_path / "small.gguf")
    path = requantize.q4_0_copy(source)
    old, new = GGUFFile.open(source), GGUFFile.open(path)
    assert new.metadata == {**old.metadata, "general.quantization_version": 2}
    assert {name: info.type for name, info in new.tensors.items()} == {
        "token_embd.weight": "Q8_0",
        "blk.0.attn_q.weight": "Q4_0",
        "blk.0.ffn_down.weight": "Q4_0",
        "blk.0.attn_norm.weight": "F32",
    }
    for name, info in old.tensors.items():
        assert new.tensors[name].shape == info.shape
        if info.type != "Q4_1":
            assert (new.raw(name) == old.raw(name)).all()
            continue
        values = dequantize(old.raw(name), "Q4_1", info.shape)
        assert new.raw(name).tobytes() == gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_0).tobytes()


def test_the_copy_is_written_once_and_anew_for_another_source(tmp_path: Path, monkeypatch) -> None:
    source = write_model(tmp_path / "small.gguf")
    first = requantize.q4_0_copy(source)
    monkeypatch.setattr(requantize, "_write", lambda *_: pytest.fail("written again"))
    assert requantize.q4_0_copy(source) == first
    monkeypatch.undo()
    monkeypatch.setenv("NANOKIT_HOME", str(tmp_path / "home"))
    source.write_bytes(source.read_bytes() + b"\0" * 32)
    assert requantize.q4_0_copy(source) != first


def test_an_interrupted_copy_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    """Half a file under the final name would be loaded by every later run."""

    def interrupted(*_: object) -> None:
        assert [path.stat().st_size for path in (tmp_path / "home").rglob("*.tmp")]
        raise KeyboardInterrupt

    source = write_model(tmp_path / "small.gguf")
    monkeypatch.setattr(requantize, "to_blocks", interrupted)
    with pytest.raises(KeyboardInterrupt):
        requantize.q4_0_copy(source)
    assert [path for path in (tmp_path / "home").rglob("*") if path.is_file()] == []
