"""Models by their names on the Hugging Face Hub, from a server on this machine that speaks as the Hub does."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import discern
from discern.artifacts.opening import open_model
from discern.cli.main import main
from discern.convert.export import export
from discern.convert.sentence_transformers import write_sentence_transformers
from discern.doctor.files import accept_folder
from discern.errors import ConfigError, DataError
from discern.interop.hub import hub_name, is_hub_name, local_model
from discern.progress import Silent
from tests.small.run import make_run

NAME, COMMIT = "somebody/small-electra", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    make_run(folder / "run")
    export(folder / "run", out=folder / "out", progress=Silent(), warn=pytest.fail)
    write_sentence_transformers(folder / "out", "cls", normalize=True)
    accept_folder(folder / "out", lambda change: None)
    (folder / "out" / "tf_model.h5").write_bytes(b"another framework's weights")
    return folder / "out"


def handler(files: dict[str, bytes], asked: list[str]) -> type[BaseHTTPRequestHandler]:
    """The two routes of the Hub that a download takes: what a repository holds, and a file of it."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.reply(body=False)

        def do_GET(self) -> None:
            self.reply(body=True)

        def reply(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            prefix = f"/{NAME}/resolve/{COMMIT}/"
            if path.startswith(f"/api/models/{NAME}/revision/"):
                listed = {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                self.send(json.dumps(listed).encode(), body=body, kind="application/json")
            elif path.startswith(f"/api/models/{NAME}/tree/"):
                tree = [{"type": "file", "path": name, "size": len(data), "oid": sha1(data)} for name, data in files.items()]
                self.send(json.dumps(tree).encode(), body=body, kind="application/json")
            elif path.startswith(prefix) and path.removeprefix(prefix) in files:
                self.send(files[path.removeprefix(prefix)], body=body)
            else:
                missing = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
                self.send(b"{}", body=body, status=404, more=missing)

        def send(
            self, data: bytes, *, body: bool, status: int = 200, kind: str = "application/octet-stream", more: Any = None
        ) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(more or {})}.items():
                self.send_header(name, value)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{sha1(data)}"')
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    return Handler


def sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def asked(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Paths that the server was asked for; the cache is empty, and the working folder too."""
    found: list[str] = []
    files = {path.relative_to(exported).as_posix(): path.read_bytes() for path in exported.rglob("*") if path.is_file()}
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(files, found))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield found
    server.shutdown()
    server.server_close()


def test_a_model_is_downloaded_once_and_used(asked: list[str], exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    folder = local_model(NAME, told.append)
    assert told == [f"{NAME}: {folder}"]
    assert (folder / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    assert not (folder / "tf_model.h5").exists(), "weights of other frameworks stay there"
    assert hub_name(folder) == f"{NAME} (Hugging Face Hub, revision 0123456)"
    assert open_model(folder, warn=pytest.fail).encoder.description == hub_name(folder)
    model = discern.load(NAME, device="cpu")
    assert model.encode(["a text"]).shape == (1, model.hidden_size)
    assert (model.vectors.pooling, model.vectors.normalize) == ("cls", True), "as its files for sentence-transformers say"
    # Without a network, what is in the cache serves.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert local_model(NAME, told.append) == folder


def test_the_verbs_take_it(asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["discern", "detect", NAME, "--text", "The old town.", "--json"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert json.loads(capsys.readouterr().out)["tokens"]
    Path("text.txt").write_text("\n\n".join(f"the model {number} reads" for number in range(30)))
    data = discern.prepare("text.txt", out="data", tokenizer=NAME, heldout=0.1, workers=1)
    assert data["documents"] == 30
    planned = discern.pretrain(data="data", out="run", init_from=NAME, dry_run=True, device="cpu")
    assert planned["parameters"] > 0


def test_a_local_folder_wins(asked: list[str], tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    assert local_model(NAME, pytest.fail) == Path(NAME)
    # A path that is mistyped in a folder that exists is no name on the Hub.
    assert local_model("somebody/smal-electra", pytest.fail) == Path("somebody/smal-electra")
    assert asked == []


@pytest.mark.parametrize("name", ["/a/b", "./a", "a", "a/b/c", "../a", "a/..", "a b/c", "-", "a/", "~/a"])
def test_what_is_no_name_on_the_hub(asked: list[str], name: str) -> None:
    assert not is_hub_name(name)
    assert local_model(name, pytest.fail) == Path(name)
    assert asked == []


def test_pickles_only_where_there_is_nothing_else(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    patterns: list[list[str]] = []

    def download(_: str, allow_patterns: list[str], **__: Any) -> str:
        patterns.append(allow_patterns)
        return "."

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    local_model("x/y", lambda _: None)
    assert "*.safetensors" in patterns[0]
    assert "pytorch_model*.bin" not in patterns[0]
    assert "pytorch_model*.bin" in patterns[1]


def test_errors_say_what_to_do(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no public model of that name") as caught:
        local_model("somebody/other", pytest.fail)
    assert "hf auth login" in str(caught.value.hint)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match="cannot be downloaded") as caught:
        discern.load("google/electra-small-discriminator")
    assert "hf download google/electra-small-discriminator --local-dir google/electra-small-discriminator" in str(
        caught.value.hint
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="needs huggingface_hub") as missing:
        local_model("google/electra-small-discriminator", pytest.fail)
    assert "pip install" in str(missing.value.hint)
