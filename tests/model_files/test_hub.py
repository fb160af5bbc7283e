"""Models by their names on the Hugging Face Hub, and exports that are pushed to it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
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
from tests.model_files.hub_server import Hub, serving
from tests.small.run import make_run
from tests.support import run_discern, run_python

NAME = "somebody/small-electra"
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    make_run(folder / "run")
    serving = Serving(sentence_transformers=True, pooling="cls", normalize=True)
    export(folder / "run", out=folder / "out", serving=serving, progress=Silent(), warn=pytest.fail)
    (folder / "out" / "tf_model.h5").write_bytes(b"another framework's weights")
    return folder / "out"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub without repositories, and a login to it; the cache is empty, and the working folder too."""
    hub = Hub()
    with serving(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.chdir(tmp_path)
        yield hub


@pytest.fixture
def asked(exported: Path, hub: Hub) -> list[str]:
    """What the Hub was asked, which has an export."""
    files = {path.relative_to(exported).as_posix(): path.read_bytes() for path in exported.rglob("*") if path.is_file()}
    hub.repositories[NAME] = {"main": files}
    return hub.asked


def test_a_model_is_downloaded_once_and_used(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    folder = local_model(NAME, told.append)
    assert told == [f"{NAME}: {folder}"]
    assert not (folder / "tf_model.h5").exists(), "weights of other frameworks stay there"
    loaded = open_model(folder, warn=pytest.fail).encoder
    assert loaded.description == f"{NAME} (Hugging Face Hub, revision {folder.name[:7]})"
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


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def run(exported: Path) -> Path:
    return exported.parent / "run"


@pytest.mark.parametrize("stores_large", [False, True])
def test_a_pushed_export_comes_back_the_same(run: Path, hub: Hub, stores_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.stores_large = stores_large
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", stores_large)  # then the weights go the older way
    done = run_discern("export", run, "--out", "out", "--all-networks", "--push", "me/first")
    assert done.returncode == 0, done.stderr
    assert f"pushed to {hub.address}/me/first/tree/main" in done.stdout
    assert hub.created == [{"organization": "me", "name": "first", "visibility": "private"}]
    assert hub.repositories["me/first"] == {"main": files_in(Path("out")) | {".gitattributes": b""}}
    assert len(hub.large) == 2 * stores_large
    (here, there), text = (discern.load(name, device="cpu") for name in ("out", "me/first")), ["The old town."]
    assert (here.encode(text) == there.encode(text)).all()


def test_a_second_push_removes_the_files_of_the_first_but_not_those_of_others(run: Path, hub: Hub) -> None:
    serving = {"sentence_transformers": True, "progress": Silent()}
    discern.export(run, out="out", push_to_hub="me/first", **serving)
    hub.repositories["me/first"]["main"] = {**hub.repositories["me/first"]["main"], "LICENSE": b"MIT", "old.onnx": b""}
    assert "modules.json" in hub.repositories["me/first"]["main"]
    discern.export(run, out="out", push_to_hub="me/first")
    others = {".gitattributes": b"", "LICENSE": b"MIT"}
    assert hub.repositories["me/first"]["main"] == files_in(Path("out")) | others


def test_revisions_are_branches(run: Path, hub: Hub) -> None:
    pushed = [discern.export(run, out="out", push_to_hub=f"me/first@{name}")["pushed"] for name in ("step-{step}", "step-20")]
    assert pushed == [f"{hub.address}/me/first/tree/step-20"] * 2
    assert hub.repositories["me/first"] == {
        "main": {".gitattributes": b""},
        "step-20": files_in(Path("out")) | {".gitattributes": b""},
    }
    assert (local_model("me/first@step-20", lambda _: None) / "config.json").read_bytes() == Path("out/config.json").read_bytes()
    assert discern.export("me/first@step-20", out="copy")["step"] == 20
    with pytest.raises(DataError, match="cannot be downloaded") as caught:
        discern.load("me/first@step-30")
    assert "hf download me/first --revision step-30 --local-dir me/first" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="without an import") as refused:
        discern.import_model("me/first@step-20", out="imported")
    assert "discern finetune me/first" in str(refused.value.hint)


def test_a_busy_hub_is_asked_again(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.failing = {part: [503, 503] for part in ("create", "branch", "preupload", "commit")}
    discern.export(run, out="out", push_to_hub="me/first@tried")
    assert hub.repositories["me/first"]["tried"]["config.json"] == Path("out/config.json").read_bytes()
    assert not any(hub.failing.values())


def test_what_makes_a_push_impossible_is_said_before_the_export(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "me/first/x", "me/..", "/me/first", "me/first@a b"):
        with pytest.raises(ConfigError, match="is not a name on the Hugging Face Hub"):
            discern.export(run, out="out", push_to_hub=name)
    hub.failing = {"create": [403]}
    with pytest.raises(ConfigError, match="me/first cannot be written") as caught:
        discern.export(run, out="out", push_to_hub="me/first")
    assert "hf auth login" in str(caught.value.hint)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(ConfigError, match="needs a login") as caught:
        discern.export(run, out="out", push_to_hub="me/first")
    assert "hf auth login" in str(caught.value.hint)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="needs huggingface_hub"):
        discern.export(run, out="out", push_to_hub="me/first")
    assert list(Path().iterdir()) == []
    assert hub.repositories == {}


@pytest.mark.parametrize(("status", "code"), [(403, 2), (400, 1)])
def test_an_upload_that_fails_leaves_the_export(run: Path, hub: Hub, status: int, code: int) -> None:
    hub.failing = {"commit": [status]}
    done = run_discern("export", run, "--out", "out", "--push", "me/first")
    assert done.returncode == code
    assert "me/first cannot be written on the Hugging Face Hub: not now" in done.stderr
    assert "out is complete; run the same command again" in done.stderr
    assert run_discern("export", run, "--out", "out", "--push", "me/first").returncode == 0
    assert hub.repositories["me/first"]["main"] == files_in(Path("out")) | {".gitattributes": b""}


def test_import_takes_the_name_of_another_model(asked: list[str], hub: Hub) -> None:
    files = dict(hub.repositories[NAME]["main"])
    config = json.loads(files["config.json"])
    del config["discern"], files["checksums.json"]
    hub.repositories[NAME]["v2"] = files | {"config.json": json.dumps(config).encode()}
    assert discern.import_model(f"{NAME}@v2", out="ours")["networks"] == ["discriminator"]
