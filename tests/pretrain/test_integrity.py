"""A flipped byte of anything that discern wrote is noticed, and so are weights that are not finite."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from discern.artifacts.finetuned import FinetunedFolder
from discern.artifacts.opening import open_model
from discern.artifacts.run import load_run
from discern.artifacts.run_record import read_record
from discern.cli.doctor import doctor
from discern.cli.main import main
from discern.convert.export import export
from discern.data.dataset.shards import TokenData
from discern.errors import ConfigError, DataError, DiscernError, NumericsError
from discern.inference.detection import load_detector
from discern.inference.model import load
from discern.inference.scoring import load_scorer
from discern.pretrain.doctor_files import Accepted, accept_folder, check_folder
from discern.pretrain.resolved_run import fill_folder
from discern.progress import Silent
from discern.storage.checksums import CHECKSUMS_NAME, VARIABLE
from discern.training import checkpoint
from tests.pretrain.test_evaluate import prepared
from tests.small.finetuned import SINGLE, make_finetuned
from tests.small.run import make_run


def flip(path: Path, place: int = -100) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[max(place, -len(content))] ^= 0x40
    path.write_bytes(content)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    make_run(root / "run")
    export(root / "run", out=root / "export", all_networks=True, progress=Silent(), warn=pytest.fail)
    make_finetuned(root / "finetuned", own=SINGLE)
    prepared(root / "data", root / "run" / "tokenizer.json")
    data = TokenData.open(root / "data")
    fill_folder(root / "run", load_run(root / "run", warn=pytest.fail).config, read_record(root / "run"), data)
    return root


@pytest.fixture
def made(originals: Path, tmp_path: Path) -> Path:
    """Folders to damage."""
    for name in ("run", "export", "finetuned", "data"):
        shutil.copytree(originals / name, tmp_path / name)
    return tmp_path


def read_whole(folder: Path) -> None:
    """Read every file of a model, the card apart."""
    model = open_model(folder, warn=pytest.fail)
    _ = model.networks(), model.objective, model.max_length, model.tokenizer_fingerprints


EXPORTED = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "discern.toml")


@pytest.mark.parametrize("name", [*EXPORTED, "generator/model.safetensors", "generator/config.json"])
def test_a_flipped_bit_in_an_export_is_refused(name: str, made: Path) -> None:
    read_whole(made / "export")
    path = made / "export" / name
    flip(path)
    with pytest.raises(DiscernError, match=rf"{path.name} is damaged or was edited") as caught:
        read_whole(made / "export")
    assert str(path) in caught.value.message


def test_a_card_may_be_edited(made: Path) -> None:
    (made / "export" / "README.md").write_text("# Mine\n")
    read_whole(made / "export")
    assert not check_folder(made / "export", Silent()).problems


def test_an_export_without_checksums_loads(made: Path) -> None:
    (made / "export" / CHECKSUMS_NAME).unlink()
    flip(made / "export" / "model.safetensors")  # nobody could tell
    read_whole(made / "export")


def test_it_can_be_switched_off(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(made / "export" / "model.safetensors")
    monkeypatch.setenv(VARIABLE, "0")
    read_whole(made / "export")


@pytest.mark.parametrize("name", ["tokenizer.json", "token-counts.txt", "config.toml"])
def test_a_flipped_bit_in_a_run_is_refused(name: str, made: Path) -> None:
    path = made / "run" / name
    flip(path, -2 if name == "token-counts.txt" else -100)
    with pytest.raises(DiscernError, match=rf"{name} is damaged or was edited"):
        load_detector(made / "run", pytest.fail)


@pytest.mark.parametrize("name", ["seed-0/model.safetensors"])
def test_a_flipped_bit_in_a_fine_tuning_is_refused(name: str, made: Path) -> None:
    flip(made / "finetuned" / name)
    with pytest.raises(DiscernError, match=r"seed-0/model\.safetensors is damaged or was edited"):
        FinetunedFolder(made / "finetuned").task_model()


@pytest.mark.parametrize("suffix", ["tokens", "documents", "sentences", "words"])
def test_a_flipped_bit_in_a_shard_is_found_at_its_first_use(suffix: str, made: Path) -> None:
    name = f"train-00000.{suffix}"
    flip(made / "data" / name, 8)
    shard = TokenData.open(made / "data").split("train").shards[0]
    with pytest.raises(DataError, match=rf"{name} is damaged: its SHA-256 is"):
        _ = (shard.tokens, shard.document_starts, shard.sentence_starts, shard.word_starts(0, 8))


def test_flipped_counts_are_found(made: Path) -> None:
    flip(made / "data" / "token-counts.int64", 8)
    with pytest.raises(DataError, match=r"token-counts\.int64 is damaged"):
        TokenData.open(made / "data").token_counts()


def test_an_index_that_is_none_takes_no_memory_even_unverified(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    flip(made / "data" / "train-00000.documents", 13)  # a document of 2**46 tokens
    shard = TokenData.open(made / "data").split("train").shards[0]
    with pytest.raises(DataError, match=r"train-00000\.documents is damaged: expected positions from 0 to"):
        _ = shard.document_starts


@pytest.mark.parametrize("key", ["sha256", "num_tokens", "size"])
def test_a_manifest_vouches_for_itself(key: str, made: Path) -> None:
    path = made / "data" / "manifest.json"
    manifest = json.loads(path.read_text())
    shard = manifest["splits"]["train"]["shards"][0]
    target = shard if key == "num_tokens" else shard["files"]["tokens"]
    target[key] = "0" * 64 if key == "sha256" else 2**50
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"manifest\.json is damaged"):
        TokenData.open(made / "data")


def test_doctor_reads_everything(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run", "export", "finetuned", "data"):
        found = check_folder(made / name, Silent())
        assert not found.problems, found.problems
        names = [each.name for each in found.files]
        assert names
        assert len(names) == len(set(names))
    flip(made / "export" / "generator" / "model.safetensors")
    (made / "export" / "tokenizer.json").unlink()
    with pytest.raises(SystemExit) as caught:
        doctor(made / "export", files=True, json_output=True)
    assert caught.value.code == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["kind"] == "export"
    states = {each["name"]: each["state"] for each in shown["files"] if each["state"] != "ok"}
    assert states == {"generator/model.safetensors": "differs", "tokenizer.json": "missing"}


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("data/train-00000.words", "differs"),
        ("data/manifest.json", "damaged"),
        ("run/run.json", "damaged"),
        ("run/checkpoints/step-00000020/model.safetensors", "damaged"),
        ("finetuned/results.json", "damaged"),
        ("finetuned/seed-0/model.safetensors", "differs"),
    ],
)
def test_doctor_finds_what_is_damaged(name: str, state: str, made: Path) -> None:
    if name.endswith(".json"):
        (made / name).write_text("{")
    else:
        flip(made / name)
    (problem,) = check_folder(made / name.partition("/")[0], Silent()).problems
    assert problem.state == state
    assert problem.name in name


def test_an_edited_export_is_accepted(made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = made / "export" / "generator" / "config.json"
    path.write_text(path.read_text().replace('"hidden_dropout_prob": 0.1', '"hidden_dropout_prob": 0.2'))
    monkeypatch.setattr(sys, "argv", ["discern", "doctor", "--accept", str(made / "export")])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "generator/config.json: " in out
    assert "accepted 1 file as" in out
    open_model(made / "export", warn=pytest.fail).networks()
    assert accept_folder(made / "export", pytest.fail) == []


def test_a_folder_without_checksums_gets_them(made: Path) -> None:
    for folder in (made / "export", made / "export" / "generator"):
        (folder / CHECKSUMS_NAME).unlink()
    found = check_folder(made / "export", Silent())
    assert [each.state for each in found.files] == ["ok", "unknown"]
    told: list[Accepted] = []
    accept_folder(made / "export", told.append)
    assert {"model.safetensors", "config.json", "generator/model.safetensors"} <= {each.name for each in told}
    flip(made / "export" / "model.safetensors")
    with pytest.raises(DiscernError, match="was edited"):
        assert open_model(made / "export", warn=pytest.fail).encoder


def test_what_cannot_be_checked_or_accepted_is_told(made: Path) -> None:
    with pytest.raises(ConfigError, match="is a data set"):
        accept_folder(made / "data", pytest.fail)
    (made / "empty").mkdir()
    for folder, says in ((made / "empty", "holds no run"), (made / "none", "does not exist")):
        with pytest.raises(DataError, match=says):
            check_folder(folder, Silent())


READERS: dict[str, Callable[[Path], object]] = {
    "detect": lambda folder: load_detector(folder, pytest.fail),
    "score": lambda folder: load_scorer(folder, None, "cpu", warn=pytest.fail),
    "encode and fine-tune": lambda folder: open_model(folder, warn=pytest.fail).encoder,
    "evaluate": lambda folder: open_model(folder, warn=pytest.fail).objective,
    "init-from": lambda folder: open_model(folder, warn=pytest.fail).weights_fingerprint,
    "export": lambda folder: export(folder, out=folder.parent / "again", progress=Silent(), warn=pytest.fail),
}
WORDS = "electra.embeddings.word_embeddings.weight"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("reader", READERS)
def test_weights_that_are_not_finite_are_refused(reader: str, value: float, made: Path) -> None:
    path = made / "export" / "model.safetensors"
    tensors = load_file(path)
    tensors[WORDS][7, 3] = value
    save_file(tensors, path, {"format": "pt"})
    (made / "export" / CHECKSUMS_NAME).unlink()
    kind = "NaN" if value != value else "infinite values"
    with pytest.raises(NumericsError, match=rf"model\.safetensors: '{WORDS}' holds {kind} \(1 of [\d,]+ values"):
        READERS[reader](made / "export")


def test_weights_of_a_run_and_of_a_fine_tuning_that_are_not_finite_are_refused(made: Path) -> None:
    run = load_run(made / "run", warn=pytest.fail)
    with torch.no_grad():
        next(iter(run.objective.parameters()))[0] = float("nan")
    contents = checkpoint.Contents(checkpoint.model_tensors(run.objective), {}, {}, {"step": 30})
    checkpoint.save(made / "run" / "checkpoints", contents, 2)
    with pytest.raises(NumericsError, match=r"step-00000030/model\.safetensors: '[\w.]+' holds NaN"):
        load_run(made / "run", warn=pytest.fail)
    path = made / "finetuned" / "seed-0" / "model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values())).fill_(float("inf"))
    save_file(tensors, path, {"format": "pt"})
    accept_folder(made / "finetuned", lambda change: None)
    with pytest.raises(NumericsError, match=r"seed-0/model\.safetensors: '[\w.]+' holds infinite values"):
        FinetunedFolder(made / "finetuned").task_model()


def test_large_weights_are_finite_although_their_sum_is_not(made: Path) -> None:
    path = made / "export" / "model.safetensors"
    tensors = load_file(path)
    tensors[WORDS].fill_(3e38)
    save_file(tensors, path, {"format": "pt"})
    accept_folder(made / "export", lambda change: None)
    assert open_model(made / "export", warn=pytest.fail).encoder


@pytest.mark.parametrize("verb", ["detect", "encode", "fill", "score"])
def test_what_overflows_in_the_network_is_no_answer(verb: str, made: Path) -> None:
    for folder in (made / "export", made / "export" / "generator"):
        tensors = load_file(folder / "model.safetensors")
        for name in tensors:
            if "LayerNorm.weight" in name or "dense" in name:
                tensors[name].fill_(1e38)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    accept_folder(made / "export", lambda change: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of words that the vocabulary lacks
        model = load(made / "export", device="cpu")
        asked: dict[str, Callable[[], object]] = {
            "detect": lambda: model.detect("the file"),
            "encode": lambda: model.encode(["the file"]),
            "fill": lambda: model.fill("the [MASK]"),
            "score": lambda: model.score(["the file"]),
        }
        with pytest.raises(NumericsError, match="not finite"):
            asked[verb]()
