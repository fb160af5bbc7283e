"""Damaged and edited files, and weights that are not finite, whoever reads them: the message names the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from discern.compare.run import read_result
from discern.data.dataset.manifest import SPLITS
from discern.data.dataset.shards import TokenData
from discern.data.job import PrepareOptions
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.doctor.files import accept_folder, check_folder
from discern.errors import ConfigError, DataError, DiscernError, NumericsError
from discern.inference.detection import chosen_threshold, head_fingerprint, load_detector
from discern.inference.model import load
from discern.inference.scoring.scorers import load_scorer
from discern.model_files.export import export
from discern.model_files.folder import open_model
from discern.model_files.run import load_run, read_record
from discern.model_files.serving import read_pooling
from discern.pretraining.run import fill_folder
from discern.progress import Silent
from discern.report.run_page import report
from discern.storage.checksums import CHECKSUMS_NAME, VARIABLE, write_json, write_lines
from discern.training import checkpoint
from discern.training.metrics import read_metrics
from tests.pretraining.test_evaluate import prepared
from tests.small.finetuned import SINGLE, make_finetuned
from tests.small.run import make_run
from tests.support import run_discern

Verb = Callable[[Path], object]


def ignore(_: object) -> None:
    """Warnings are none of these tests' business."""


def sums(module: nn.Module) -> list[float]:
    return [float(tensor.double().sum()) for tensor in checkpoint.model_tensors(cast(Any, module)).values()]


def read_run(folder: Path) -> object:
    run = load_run(folder, warn=ignore)
    return run.weights_fingerprint, run.record, run.config, run.tokenizer.to_str(), read_metrics(folder)


def read_model(folder: Path) -> object:
    model = open_model(folder, warn=ignore)
    weights = [sums(network.encoder) for network in model.networks().values()]
    return weights, sums(model.objective), model.config, model.tokenizer.to_str(), model.max_length, model.weights_fingerprint


def read_task(folder: Path) -> object:
    model = open_model(folder, warn=ignore).task_model()
    return sums(model.objective), model.record["tasks"], model.tokenizer.to_str()


def read_data(folder: Path) -> object:
    data = TokenData.open(folder)
    splits = [data.split(name) for name in SPLITS]
    tokens = [(split.read(0, split.num_tokens).tolist(), split.word_starts(0, split.num_tokens).tolist()) for split in splits]
    starts = [[*shard.document_starts, *shard.sentence_starts] for split in splits for shard in split.shards]
    return data.manifest, data.tokenizer().to_str(), data.token_counts().tolist(), tokens, starts


def threshold(folder: Path) -> float:
    return chosen_threshold(folder, load_detector(folder, ignore), None, ignore)[0]


def read_vectors(folder: Path) -> object:
    return read_pooling(folder, "cls-first")


VERBS: dict[str, dict[str, Verb]] = {
    "run": {"load": read_run, "report": lambda folder: report(folder, None, warn=ignore).read_text(), "detect": threshold},
    "export": {"open": read_model, "detect": threshold, "embed": read_vectors},
    "finetuned": {"predict": read_task, "report": lambda folder: report(folder, None).read_text()},
    "task": {"predict": read_task, "embed": read_vectors},
    "data": {"train": read_data},
    "unit": {"compare": read_result},
}
"""What commands read from each kind of folder."""
OPTIONAL = {
    "metrics.jsonl",
    "evaluation.json",
    "detection.json",
    "mistakes-own.jsonl",
    "scores.json",
    "result.json",
}
"""Files that need not exist, as results that are computed again."""
UNREAD = {"README.md", "report.html", "config_sentence_transformers.json"}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    run = root / "run"
    make_run(run)
    export(run, out=root / "export", all_networks=True, progress=Silent(), warn=pytest.fail)
    make_finetuned(root / "finetuned", own=SINGLE)
    mistakes = [{"text": "the file", "gold": "good", "label": "bad", "badness": 0.75}] * 2
    write_lines(root / "finetuned" / "seed-0" / "mistakes-own.jsonl", mistakes)
    export(root / "finetuned", out=root / "task", progress=Silent(), warn=pytest.fail)
    data = TokenData.open(prepared(root / "data", run / "tokenizer.json"))
    fill_folder(run, load_run(run, warn=pytest.fail).config, read_record(run), data)
    head = head_fingerprint(load_detector(run, pytest.fail).network)
    write_json(run / "detection.json", {"format": 1, "threshold": 0.7, "wanted_precision": 0.9, "head_fingerprint": head})
    write_json(run / "evaluation.json", {"step": 20, "by_frequency": [], "by_position": []})
    unit = root / "unit"
    unit.mkdir()
    write_json(unit / "result.json", {"format": 1, "specification": {}, "pretraining": None, "tasks": {}})
    return root


@pytest.fixture
def made(originals: Path, tmp_path: Path) -> Path:
    """Folders to damage."""
    return shutil.copytree(originals, tmp_path / "made")


def refusals(folder: Path, verbs: Mapping[str, Verb], expected: Mapping[str, object]) -> Iterator[DiscernError]:
    """The errors of the verbs; those that do not fail read what is expected."""
    for name, verb in verbs.items():
        try:
            value = verb(folder)
        except DiscernError as problem:
            yield problem
        else:
            assert value == expected.get(name, value), name


def flip(path: Path, position: int = -100) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def damages(good: bytes) -> dict[str, bytes]:
    half, garbage = good[: len(good) // 2], bytes(range(128, 256)) * 4
    return {"empty": b"", "half": half, "garbage": garbage, "an object": b"{}", "nested": b"[" * 100_000}


HARMLESS = {
    "finetuned/config.toml": {"empty", "half", "an object", "nested"},
    "finetuned/seed-0/mistakes-own.jsonl": {"empty", "half"},
    "export/tokenizer_config.json": {"an object"},
    "task/tokenizer_config.json": {"an object"},
}
"""Damages that only a checksum can tell. Of tables, some may hold nothing, or end early."""


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("kind", VERBS)
def test_a_damaged_file_is_named_or_has_no_effect(kind: str, verified: bool, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One changed bit is noticed by its checksum, and worse damage without it; `discern doctor --files` lists both."""
    monkeypatch.setenv(VARIABLE, str(int(verified)))
    folder, verbs = made / kind, VERBS[kind]
    expected = {name: verb(folder) for name, verb in verbs.items()} if verified else {}
    assert kind == "unit" or not check_folder(folder, Silent())["problems"]
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in UNREAD):
        good, name = path.read_bytes(), str(path.relative_to(made))
        for damage in (*([] if path.name in OPTIONAL else ["missing"]), 0, len(good) // 2, -1) if verified else damages(good):
            if damage == "missing":
                path.unlink()
            elif isinstance(damage, int):
                flip(path, damage)
            else:
                path.write_bytes(damages(good)[damage])
            problems = list(islice(refusals(folder, verbs, expected), 1 if verified else None))
            # A wrong digest makes the file that it belongs to appear damaged; the tokenizer of the generator is a copy.
            is_digest, may_pass = path.name == CHECKSUMS_NAME, damage in HARMLESS.get(name, ())
            assert all(problem.hint and (path.name in problem.message or is_digest) for problem in problems), (name, damage)
            assert problems or may_pass or is_digest or path.parent.name == "generator", (name, damage)
            is_lost = is_digest and damage == "missing"
            assert kind == "unit" or not verified or is_lost or check_folder(folder, Silent())["problems"], (name, damage)
            path.write_bytes(good)


RECORDS = (
    *("run/run.json", "run/checkpoints/step-00000020/state.json", "export/config.json", "data/manifest.json"),
    *("finetuned/finetuned.json", "finetuned/results.json", "finetuned/seed-0/scores.json"),
)


def changed(good: bytes) -> Iterator[bytes]:
    """A record without each of its keys in turn, and with a wrong value under it."""
    record = json.loads(good)
    for key in record:
        yield json.dumps({name: value for name, value in record.items() if name != key}).encode()
        for value in ([], -1, 1e308):
            yield json.dumps({**record, key: value}).encode()


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_lacks_a_key_or_has_a_wrong_value_is_named_where_that_matters(
    name: str, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    path, kind = made / name, name.partition("/")[0]
    for content in changed(path.read_bytes()):
        path.write_bytes(content)
        if (problem := next(refusals(made / kind, VERBS[kind], {}), None)) is not None:
            # What describes weights may also be found to be wrong by the weights.
            expected = (path.name, ".safetensors", "no weight", "discern.toml")
            assert any(says in str(problem) for says in expected), (content[:300], problem)


def test_a_data_set_without_a_manifest_is_replaced_as_the_hint_says(made: Path) -> None:
    (made / "data" / "manifest.json").write_text("")

    def again(**options: Any) -> None:
        tokenizer, build = TokenizerChoice(made / "run" / "tokenizer.json"), PrepareOptions(heldout=0.5, workers=1)
        prepare([str(made / "data.txt")], out=made / "data", tokenizer=tokenizer, options=build, progress=Silent(), **options)

    with pytest.raises(DataError, match=r"manifest\.json is damaged"):
        again()
    again(overwrite=True)
    assert read_data(made / "data")


def test_doctor_lists_what_has_changed(made: Path) -> None:
    flip(made / "export" / "generator" / "model.safetensors")
    (made / "export" / "tokenizer.json").unlink()
    (made / "export" / "README.md").write_text("# Mine\n")  # a card may be edited
    (made / "run" / "run.json").write_text("{")
    states = {"export": {"generator/model.safetensors": "differs", "tokenizer.json": "missing"}, "run": {"run.json": "differs"}}
    for kind, expected in states.items():
        done = run_discern("doctor", made / kind, "--files", "--json")
        assert done.returncode == 1
        shown = json.loads(done.stdout)
        assert shown["kind"] == kind
        assert {file["name"]: file["state"] for file in shown["files"] if file["state"] != "ok"} == expected


def test_an_edited_export_is_accepted(made: Path) -> None:
    path = made / "export" / "generator" / "config.json"
    path.write_text(path.read_text().replace('"hidden_dropout_prob": 0.1', '"hidden_dropout_prob": 0.2'))
    out = run_discern("doctor", made / "export", "--accept").stdout
    assert "generator/config.json: " in out
    assert out.endswith(": accepted 1 file\n")
    open_model(made / "export", warn=pytest.fail).networks()
    assert accept_folder(made / "export")["accepted"] == []


def test_a_folder_without_checksums_gets_them(made: Path) -> None:
    folder = made / "export"
    for path in (folder, folder / "generator"):
        (path / CHECKSUMS_NAME).unlink()
    assert {file["state"] for file in check_folder(folder, Silent())["files"]} == {"unknown"}
    accepted = {change["name"] for change in accept_folder(folder)["accepted"]}
    assert {"model.safetensors", "config.json", "generator/model.safetensors"} <= accepted
    flip(folder / "model.safetensors")
    with pytest.raises(DiscernError, match="was edited"):
        read_model(folder)


def test_what_cannot_be_checked_or_accepted_is_told(made: Path) -> None:
    flip(made / "data" / "train-00000.tokens")
    with pytest.raises(ConfigError, match=r"have changed, and changed shards of a data set cannot"):
        accept_folder(made / "data")
    for folder, says in ((made, "holds no run"), (made / "none", "does not exist")):
        with pytest.raises(DataError, match=says):
            check_folder(folder, Silent())


# Weights that are not finite, although nothing is damaged.

WORDS = "electra.embeddings.word_embeddings.weight"


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object], name: str = "model.safetensors") -> None:
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, {"format": "pt"})
    accept_folder(folder)


OPENERS: dict[str, Verb] = {
    "detect": lambda folder: load_detector(folder, ignore),
    "score": lambda folder: load_scorer(folder, None, "cpu", warn=ignore),
    "encode and fine-tune": lambda folder: open_model(folder, warn=ignore).encoder,
    "evaluate": lambda folder: open_model(folder, warn=ignore).objective,
    "init-from": lambda folder: open_model(folder, warn=ignore).weights_fingerprint,
    "export": lambda folder: export(folder, out=folder.parent / "again", progress=Silent(), warn=ignore),
}


@pytest.mark.parametrize("opener", OPENERS)
def test_an_export_whose_weights_are_not_finite_is_refused(opener: str, made: Path) -> None:
    edit_weights(made / "export", lambda tensors: tensors[WORDS][7, :1].fill_(float("nan")))
    with pytest.raises(NumericsError, match=rf"model\.safetensors: '{WORDS}' holds NaN \(1 of [\d,]+ values"):
        OPENERS[opener](made / "export")


def test_a_run_or_a_fine_tuning_whose_weights_are_not_finite_is_refused(made: Path) -> None:
    edit_weights(made / "finetuned", lambda tensors: next(iter(tensors.values())).fill_(float("inf")), "seed-0/model.safetensors")
    with pytest.raises(NumericsError, match=r"seed-0/model\.safetensors: '[\w.]+' holds infinite values"):
        read_task(made / "finetuned")
    good = load_run(made / "run", warn=pytest.fail).objective
    tensors = {name: torch.full_like(tensor, float("nan")) for name, tensor in checkpoint.model_tensors(good).items()}
    checkpoint.save(made / "run" / "checkpoints", checkpoint.Contents(tensors, {}, {}, {"step": 30}), 2)
    with pytest.raises(NumericsError, match=r"step-00000030/model\.safetensors: '[\w.]+' holds NaN"):
        read_run(made / "run")


def test_large_weights_are_finite_although_their_sum_is_not(made: Path) -> None:
    edit_weights(made / "export", lambda tensors: tensors[WORDS].fill_(3e38))
    assert open_model(made / "export", warn=pytest.fail).encoder


@pytest.mark.filterwarnings("ignore")  # of words that the vocabulary lacks
def test_what_overflows_in_the_network_is_no_answer(made: Path) -> None:
    def enlarge(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if "LayerNorm.weight" in name or "dense" in name:
                tensor.fill_(1e38)

    for name in ("generator/model.safetensors", "model.safetensors"):
        edit_weights(made / "export", enlarge, name)
    model = load(made / "export", device="cpu")
    for verb, text in ((model.detect, "a"), (model.fill, "[MASK]"), (model.encode, ["a"]), (model.score, ["a"])):
        with pytest.raises(NumericsError, match="not finite"):
            verb(text)  # type: ignore[operator]
