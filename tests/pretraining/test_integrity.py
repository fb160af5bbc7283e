"""A flipped byte of anything that discern wrote is noticed, and so are weights that are not finite."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from discern.artifacts.finetuned import FinetunedFolder, write_json, write_lines
from discern.artifacts.opening import open_model
from discern.artifacts.run import load_run, read_record
from discern.cli.doctor import doctor
from discern.cli.main import main
from discern.compare.results import Unit
from discern.convert.export import export
from discern.convert.export_finetuned import export_task
from discern.data.dataset.build import BuildOptions
from discern.data.dataset.manifest import SPLITS
from discern.data.dataset.shards import TokenData
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.doctor.files import Accepted, accept_folder, check_folder
from discern.errors import ConfigError, DataError, DiscernError, NumericsError
from discern.inference.calibration import chosen_threshold, head_fingerprint
from discern.inference.detection import load_detector
from discern.inference.model import load
from discern.inference.scoring import load_scorer
from discern.interop.sentence_transformers import read_pooling
from discern.pretraining.run import fill_folder
from discern.progress import Silent
from discern.report.finetuned_page import report_finetuned
from discern.report.run_page import report
from discern.storage.checksums import CHECKSUMS_NAME, VARIABLE, write_recorded
from discern.training import checkpoint
from discern.training.metrics_log import read_metrics
from discern.training.pretrain_config import read_written_config
from tests.pretraining.test_evaluate import prepared
from tests.small.finetuned import SINGLE, make_finetuned
from tests.small.run import make_run


def flipped(content: bytes, place: int) -> bytes:
    """The content with one bit changed."""
    changed = bytearray(content)
    changed[max(place, -len(content))] ^= 0x01
    return bytes(changed)


def flip(path: Path, place: int = -100) -> None:
    path.write_bytes(flipped(path.read_bytes(), place))


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    make_run(root / "run")
    export(root / "run", out=root / "export", all_networks=True, progress=Silent(), warn=pytest.fail)
    make_finetuned(root / "finetuned", own=SINGLE)
    mistakes = [{"text": "the file", "gold": "good", "label": "bad", "badness": 0.75}] * 2
    write_lines(root / "finetuned" / "seed-0" / "mistakes-own.jsonl", mistakes)
    export_task(root / "finetuned", out=root / "task", progress=Silent())
    prepared(root / "data", root / "run" / "tokenizer.json")
    data = TokenData.open(root / "data")
    fill_folder(root / "run", load_run(root / "run", warn=pytest.fail).config, read_record(root / "run"), data)
    network = load_detector(root / "run", pytest.fail).network
    kept = {"format": 1, "threshold": 0.7, "wanted_precision": 0.9, "head_fingerprint": head_fingerprint(network)}
    write_json(root / "run" / "detection.json", kept)
    write_json(root / "run" / "evaluation.json", {"step": 20, "rows": 3})
    (root / "unit").mkdir()
    write_recorded(root / "unit", {"config.toml": (root / "run" / "config.toml").read_text()})
    unit = Unit(cast(Any, SimpleNamespace(name="small")), 1, root / "unit", root / "unit")
    numbers = dict.fromkeys(("steps", "seconds", "tokens"), 1)
    unit.end(
        {"equal": "tokens", "budget": 1.0, "data_fingerprint": "", "network": None, "statistics": {}, **numbers}
        | {"held_out": {}, "curve": []}
    )
    write_json(root / "unit" / "own.json", {"format": 1, "asked": {}, "seeds": [0], "scores": [0.5], "failed_seeds": {}})
    return root


@pytest.fixture
def made(originals: Path, tmp_path: Path) -> Path:
    """Folders to damage."""
    for name in KINDS:
        shutil.copytree(originals / name, tmp_path / name)
    return tmp_path


def read_whole(folder: Path) -> None:
    """Read every file of a model, the card apart."""
    model = open_model(folder, warn=pytest.fail)
    _ = model.networks(), model.objective, model.max_length, model.tokenizer_fingerprints


@dataclass(frozen=True)
class Kind:
    """A kind of folder.

    Attributes:
        read: everything that commands read from it.
        optional: files that need not exist, as results that are computed again.
        unread: files that no command reads.
    """

    read: Callable[[Path], object]
    optional: frozenset[str] = frozenset()
    unread: frozenset[str] = frozenset()


def read_run(folder: Path) -> object:
    run = load_run(folder, warn=lambda message: None)
    page = report(folder, None, warn=lambda message: None).read_text()
    threshold = chosen_threshold(folder, load_detector(folder, lambda message: None), None, pytest.fail)
    return run.weights_fingerprint, run.record, run.config, run.tokenizer.to_str(), page, read_metrics(folder), threshold.value


def read_export(folder: Path) -> object:
    model = open_model(folder, warn=pytest.fail)
    weights = [checkpoint.model_tensors(network.encoder) for network in model.networks().values()]
    pooling = read_pooling(folder)
    _ = model.objective
    return [total(each) for each in weights], model.config, model.tokenizer.to_str(), model.max_length, pooling


def read_finetuned(folder: Path) -> object:
    model = FinetunedFolder(folder).task_model()
    page = report_finetuned(folder, None).read_text()
    return total(checkpoint.model_tensors(model.objective)), model.record, model.tokenizer.to_str(), page


def read_task(folder: Path) -> object:
    model = open_model(folder, warn=pytest.fail).task_model()
    return total(checkpoint.model_tensors(model.objective)), model.record["tasks"], model.tokenizer.to_str(), read_pooling(folder)


def read_data(folder: Path) -> object:
    data = TokenData.open(folder)
    splits = [data.split(name) for name in SPLITS]
    tokens = [split.read(0, split.num_tokens).tolist() for split in splits]
    words = [split.word_starts(0, split.num_tokens).tolist() for split in splits]
    starts = [[*shard.document_starts, *shard.sentence_starts] for split in splits for shard in split.shards]
    return data.manifest, data.tokenizer().to_str(), data.token_counts().tolist(), tokens, words, starts


def read_unit(folder: Path) -> object:
    unit = Unit(cast(Any, SimpleNamespace(name="small")), 1, folder, folder)
    return unit.pretraining(), unit.scores(cast(Any, SimpleNamespace(name="own"))), read_written_config(folder / "config.toml")


def total(tensors: Mapping[str, Tensor]) -> list[float]:
    return [float(tensor.double().sum()) for tensor in tensors.values()]


CARD = frozenset({"README.md"})
KINDS = {
    "run": Kind(read_run, frozenset({"metrics.jsonl", "evaluation.json", "detection.json"}), frozenset({"report.html"})),
    "export": Kind(read_export, unread=CARD),
    "finetuned": Kind(read_finetuned, frozenset({"mistakes-own.jsonl", "scores.json"}), frozenset({"report.html"})),
    "task": Kind(read_task, unread=CARD | {"config_sentence_transformers.json"}),
    "data": Kind(read_data),
    "unit": Kind(read_unit, frozenset({"pretraining.json", "own.json"})),
}


@pytest.mark.parametrize("name", KINDS)
def test_one_changed_byte_in_any_file_is_refused_or_has_no_effect(name: str, made: Path) -> None:
    """The loss of a file that has to be there is refused as well; the message names it."""
    kind, folder = KINDS[name], made / name
    before = kind.read(folder)
    assert not check_folder(folder, Silent()).problems if name != "unit" else True
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in kind.unread):
        good = path.read_bytes()
        for place in (*((len(good) * third // 3 for third in range(3)) if path.suffix != ".safetensors" else ()), -1, None):
            if place is None and path.name in kind.optional:
                continue
            path.unlink() if place is None else path.write_bytes(flipped(good, place))
            try:
                found, refusal = kind.read(folder), None
            except DiscernError as problem:
                found, refusal = before, problem
            assert found == before, f"{path}, byte {place}"
            if refusal is None:  # a digest, or a copy of the tokenizer, which discern reads at the root
                assert path.name == CHECKSUMS_NAME or path.parent.name == "generator", f"{path}, byte {place}"
            else:
                # A wrong digest makes the file that it belongs to appear damaged.
                assert path.name in refusal.message or path.name == CHECKSUMS_NAME, f"{path}, byte {place}"
                assert refusal.hint
            path.write_bytes(good)


def test_a_card_may_be_edited(made: Path) -> None:
    (made / "export" / "README.md").write_text("# Mine\n")
    read_whole(made / "export")
    assert not check_folder(made / "export", Silent()).problems


def test_a_data_set_without_a_manifest_is_replaced_as_the_hint_says(originals: Path, made: Path) -> None:
    data = made / "data"
    (data / "manifest.json").write_text("")
    options: dict[str, Any] = {
        "tokenizer": TokenizerChoice(originals / "run" / "tokenizer.json"),
        "build": BuildOptions(heldout=0.5, workers=1),
        "progress": Silent(),
    }
    for verb in (lambda: TokenData.open(data), lambda: prepare([str(originals / "data.txt")], out=data, **options)):
        with pytest.raises(DataError, match=r"manifest\.json is damaged") as caught:
            verb()
        assert caught.value.hint
    prepare([str(originals / "data.txt")], out=data, overwrite=True, **options)
    assert read_data(data)


def test_it_can_be_switched_off(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(made / "export" / "model.safetensors")
    monkeypatch.setenv(VARIABLE, "0")
    read_whole(made / "export")


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
    assert next((each.name, each.state) for each in found.problems) == ("checksums.json", "missing")
    told: list[Accepted] = []
    accept_folder(made / "export", told.append)
    assert {"model.safetensors", "config.json", "generator/model.safetensors"} <= {each.name for each in told}
    flip(made / "export" / "model.safetensors")
    with pytest.raises(DiscernError, match="was edited"):
        assert open_model(made / "export", warn=pytest.fail).encoder


def test_what_cannot_be_checked_or_accepted_is_told(made: Path) -> None:
    flip(made / "data" / "train-00000.tokens")
    with pytest.raises(ConfigError, match=r"train-00000\.tokens has changed, and changed shards of a data set cannot"):
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
    accept_folder(made / "export", lambda change: None)
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
