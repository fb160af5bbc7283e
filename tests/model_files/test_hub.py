"""Models by their names on the Hugging Face Hub, from a server on this machine that speaks as the Hub does."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

import discern
from discern.errors import ConfigError, DataError
from discern.model_files.export import export
from discern.model_files.folder import open_model
from discern.model_files.hub import local_model
from discern.model_files.serving import Serving
from discern.progress import Silent
from tests.small.run import make_run
from tests.support import run_python

NAME, COMMIT = "somebody/small-electra", "0123456789abcdef0123456789abcdef01234567"
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    make_run(folder / "run")
    serving = Serving(sentence_transformers=True, pooling="cls", normalize=True)
    export(folder / "run", out=folder / "out", serving=serving, progress=Silent(), warn=pytest.fail)
    (folder / "out" / "tf_model.h5").write_bytes(b"another framework's weights")
    return folder / "out"


def handler(files: Mapping[str, bytes], asked: list[str]) -> type[BaseHTTPRequestHandler]:
    """The routes of the Hub that a download takes: what a repository holds, and a file of it."""
    about = {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
    tree = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in files.items()]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            asked.append(path)
            data = files.get(path.removeprefix(f"/{NAME}/resolve/{COMMIT}/"))
            for route, listed in (("revision", about), ("tree", tree)):
                if path.startswith(f"/api/models/{NAME}/{route}/"):
                    data = json.dumps(listed).encode()
            content = data or b"{}"
            self.send_response(404 if data is None else 200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("X-Error-Code", "RepoNotFound")  # read only if there is an error
            self.send_header("ETag", hashlib.sha1(content).hexdigest())
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def do_HEAD(self) -> None:
            self.do_GET()

    return Handler


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


def test_a_model_is_downloaded_once_and_used(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    folder = local_model(NAME, told.append)
    assert told == [f"{NAME}: {folder}"]
    assert not (folder / "tf_model.h5").exists(), "weights of other frameworks stay there"
    loaded = open_model(folder, warn=pytest.fail).encoder
    assert loaded.description == f"{NAME} (Hugging Face Hub, revision 0123456)"
    assert loaded.provenance["base_models"] == [NAME]
    model = discern.load(NAME, device="cpu")
    assert model.encode(["a text"]).shape == (1, model.hidden_size)
    assert (model.vectors.pooling, model.vectors.normalize) == ("cls", True), "as its files for sentence-transformers say"
    # Without a network, what is in the cache serves.
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    assert local_model(NAME, told.append) == folder


def test_the_commands_take_it(asked: list[str]) -> None:
    done = run_python("-m", "discern", "detect", NAME, "--text", "The old town.", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"]
    Path("text.txt").write_text("\n\n".join(f"the model {number} reads" for number in range(30)))
    discern.prepare("text.txt", out="data", tokenizer=NAME, heldout=0.1, workers=1)
    assert discern.pretrain(data="data", out="run", init_from=NAME, dry_run=True, device="cpu")["parameters"]


# The second is a path that is mistyped in a folder that exists.
@pytest.mark.parametrize("name", [NAME, "somebody/smal-electra", "/a/b", "a", "a/b/c", "../a", "a/..", "~/a"])
def test_paths_are_not_asked_for(asked: list[str], name: str) -> None:
    Path(NAME).mkdir(parents=True)
    assert local_model(name, pytest.fail) == Path(name)
    assert asked == []


def test_pickles_only_where_there_is_nothing_else(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    patterns: list[list[str]] = []

    def download(_: str, allow_patterns: list[str], **__: object) -> str:
        patterns.append(allow_patterns)
        return "."

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    local_model("x/y", lambda _: None)
    assert ["pytorch_model*.bin" in each for each in patterns] == [False, True]


def test_errors_say_what_to_do(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no public model") as caught:
        local_model("somebody/other", pytest.fail)
    assert "hf auth login" in str(caught.value.hint)
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    with pytest.raises(DataError, match="cannot be downloaded") as caught:
        discern.load("google/electra-small-discriminator")
    assert "hf download google/electra-small-discriminator" in str(caught.value.hint)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="needs huggingface_hub"):
        local_model("google/electra-small-discriminator", pytest.fail)
