"""`org/name`: a small hub on the loopback, asked by the real client in a process of its own (it reads its settings when
it is imported)."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tiny import save_tiny, tiny_model

COMMIT = "c0ffee" + "0" * 34

LOADER = """
import json, sys
from nanokit.engine.load import load
from nanokit.errors import ModelFileError
found = {}
for name in sys.argv[1:]:
    try:
        engine = load(name)
        found[name] = [engine.model.name, engine.generate([[1, 2]])[0].token_ids]
    except ModelFileError as error:
        found[name] = str(error)
print(json.dumps(found))
"""


class Hub:
    """Repositories are folders; `asked` are the files that were fetched."""

    def __init__(self, root: Path) -> None:
        self.root, self.asked = root, []  # type: tuple[Path, list[str]]
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler, body: bool) -> None:
        parts = request.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"] and (folder := self.root / "/".join(parts[2:4])).is_dir():
            payload = json.dumps(self.tree(folder) if parts[4] == "tree" else self.info(folder)).encode()
            return self.send(request, 200, payload, {"Content-Type": "application/json"}, body)
        file = self.root / "/".join(parts[:2]) / "/".join(parts[4:])
        if parts[2:4] == ["resolve", COMMIT] and file.is_file():
            if body:
                self.asked.append("/".join(parts[4:]))
            payload = file.read_bytes()
            return self.send(request, 200, payload, {"ETag": f'"{self.etag(file)}"', "X-Repo-Commit": COMMIT}, body)
        return self.send(request, 404, b"", {"X-Error-Code": "RepoNotFound"}, body)

    @staticmethod
    def send(request: BaseHTTPRequestHandler, status: int, payload: bytes, headers: dict[str, str], body: bool) -> None:
        request.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(payload))}.items():
            request.send_header(key, value)
        request.end_headers()
        if body:
            request.wfile.write(payload)

    @staticmethod
    def etag(file: Path) -> str:
        return hashlib.sha1(file.read_bytes()).hexdigest()

    def info(self, folder: Path) -> dict[str, Any]:
        return {"id": "/".join(folder.parts[-2:]), "sha": COMMIT, "siblings": [], "tags": []}

    def tree(self, folder: Path) -> list[dict[str, Any]]:
        files = [file for file in folder.rglob("*") if file.is_file()]
        return [
            {
                "type": "file",
                "path": str(f.relative_to(folder)),
                "size": f.stat().st_size,
                "oid": self.etag(f),
            }
            for f in files
        ]

    def load(self, *names: str, cache: Path, **environment: str) -> Any:
        settings = {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}", "HF_HOME": str(cache),
            "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "5",
            "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", LOADER, *names],
            env={**os.environ, **settings, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub")
    tiny = tiny_model("llama")
    whole = save_tiny(root / "org" / "whole", tiny)
    for extra in ("pytorch_model.bin", "consolidated.safetensors", "model.fp16.safetensors", "modeling.py"):
        (whole / extra).write_bytes(b"never fetched")
    (whole / "onnx").mkdir()
    (whole / "onnx" / "model.safetensors").write_bytes(b"never fetched")
    save_tiny(root / "org" / "sharded", tiny, max_shard_size="100KB")
    gptq = save_tiny(root / "org" / "gptq", tiny)
    config = json.loads((gptq / "config.json").read_text())
    (gptq / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    pickled = save_tiny(root / "org" / "pickled", tiny)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    (root / "org" / "model-GGUF").mkdir()
    (root / "org" / "model-GGUF" / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    serving = Hub(root)
    yield serving
    serving.server.shutdown()


@pytest.fixture(scope="module")
def fetched(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The cache, and what became of each name: one process, since importing torch is most of its time."""
    cache = tmp_path_factory.mktemp("cache")
    names = ["whole", "sharded", "gptq", "pickled", "model-GGUF", "nowhere", "a--b"]
    return cache, hub.load(*(f"org/{name}" for name in names), cache=cache)


def test_a_name_on_the_hub_loads(fetched: tuple[Path, Any]) -> None:
    """The engine has the model's name, not that of a folder in the cache."""
    whole, sharded = fetched[1]["org/whole"], fetched[1]["org/sharded"]
    assert (whole[0], sharded[0]) == ("org/whole", "org/sharded")
    assert whole[1] == sharded[1]


def test_only_what_is_loaded_is_fetched(hub: Hub, fetched: tuple[Path, Any]) -> None:
    """Repositories hold their weights several times over; of those that cannot run, none is fetched."""
    shards = [file.name for file in (hub.root / "org" / "sharded").glob("*.safetensors")]
    assert len(shards) > 1
    assert sorted(file for file in hub.asked if not file.endswith(".json")) == sorted(["model.safetensors", *shards])


def test_what_cannot_be_loaded_is_refused_by_name(fetched: tuple[Path, Any]) -> None:
    refused = fetched[1]
    assert "gptq" in refused["org/gptq"]
    for name in ("org/pickled", "org/model-GGUF"):
        assert "holds no safetensors weights" in refused[name]
        assert ".gguf file" in refused[name]
    for name in ("org/nowhere", "org/a--b"):
        assert "could not be fetched" in refused[name]
        assert "do: check the name" in refused[name]


def test_what_is_in_the_cache_loads_offline(hub: Hub, fetched: tuple[Path, Any]) -> None:
    before = len(hub.asked)
    found = hub.load("org/whole", "org/nowhere", cache=fetched[0], HF_HUB_OFFLINE="1")
    assert found["org/whole"] == fetched[1]["org/whole"]
    assert "the hub model org/nowhere could not be fetched" in found["org/nowhere"]
    assert "local path" in found["org/nowhere"]
    assert len(hub.asked) == before


def test_a_hub_that_nobody_reaches_is_one_clear_message(hub: Hub, tmp_path: Path) -> None:
    refused = hub.load("org/whole", cache=tmp_path, HF_ENDPOINT="http://127.0.0.1:9")["org/whole"]
    assert "the hub model org/whole could not be fetched" in refused
    assert "found: " in refused
