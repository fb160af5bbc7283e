"""Damaged small files, whatever the damage and whoever reads them: the message names the file; nothing is unexpected."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from discern.artifacts.opening import open_model
from discern.artifacts.run import load_run
from discern.convert.export import export
from discern.convert.export_finetuned import export_task
from discern.data.dataset.shards import TokenData
from discern.errors import ConfigError, DiscernError
from discern.inference.calibration import chosen_threshold, head_fingerprint
from discern.inference.detection import load_detector
from discern.inference.fill import load_filler
from discern.inference.scoring import load_scorer
from discern.progress import Silent
from discern.report.finetuned_page import report_finetuned
from discern.report.run_page import report
from discern.storage.checksums import VARIABLE
from tests.pretraining.test_evaluate import prepared
from tests.small.finetuned import SINGLE, make_finetuned
from tests.small.run import make_run

Verb = Callable[[Path], object]


def ignore(_: str) -> None:
    """Warnings are none of these tests' business."""


def read_whole(folder: Path) -> None:
    """As training and evaluation read a data set."""
    data = TokenData.open(folder)
    data.tokenizer()
    data.token_counts()
    for name in ("train", "heldout"):
        split = data.split(name)
        split.read(0, split.num_tokens)
        split.word_starts(0, split.num_tokens)
        for shard in split.shards:
            assert shard.document_starts[-1] == shard.sentence_starts[-1] == shard.info.num_tokens


def export_of(run: Path) -> None:
    export(run, out=run.parent / "exported", all_networks=True, progress=Silent(), warn=ignore)


def again(folder: Path) -> None:
    export(folder, out=folder.parent / "again", all_networks=True, progress=Silent(), warn=pytest.fail)


def threshold(folder: Path) -> None:
    chosen_threshold(folder, load_detector(folder, ignore), None, ignore)


def init_from(folder: Path) -> None:
    model = open_model(folder, warn=ignore)
    _ = model.config, model.weights_fingerprint, model.tokenizer_fingerprints


def export_of_task(folder: Path) -> None:
    export_task(folder, out=folder.parent / "task", progress=Silent())


RUN: dict[str, Verb] = {
    "load": lambda folder: load_run(folder, warn=ignore),
    "init-from": init_from,
    "export": export_of,
    "report": lambda folder: report(folder, None, warn=ignore),
    "detect": threshold,
}
EXPORT: dict[str, Verb] = {
    "detect": threshold,
    "fill": lambda folder: load_filler(folder, ignore, "cpu"),
    "score": lambda folder: load_scorer(folder, None, "cpu", warn=ignore),
    "encode": lambda folder: open_model(folder, warn=ignore).encoder,
    "evaluate": lambda folder: open_model(folder, warn=ignore).objective,
    "init-from": init_from,
    "export": again,
}
FINETUNED: dict[str, Verb] = {
    "predict": lambda folder: open_model(folder, warn=ignore).task_model(),
    "report": lambda folder: report_finetuned(folder, None),
    "export": export_of_task,
}
TASK: dict[str, Verb] = {
    "predict": lambda folder: open_model(folder, warn=ignore).task_model(),
    "encode": lambda folder: open_model(folder, warn=ignore).encoder,
}
DATA: dict[str, Verb] = {"train": read_whole}

# Which verbs read a file, and so have to notice that it is gone bad; an empty card or journal is none the worse.
FILES: dict[str, tuple[dict[str, Verb], tuple[str, ...]]] = {
    "run/run.json": (RUN, ("load", "init-from", "export", "report", "detect")),
    "run/config.toml": (RUN, ("load", "init-from", "export", "report", "detect")),
    "run/tokenizer.json": (RUN, ("export", "detect")),
    "run/token-counts.txt": (RUN, ("load", "init-from", "export", "detect")),
    "run/metrics.jsonl": (RUN, ("report",)),
    "run/evaluation.json": (RUN, ("report",)),
    "run/blimp.json": (RUN, ("report",)),
    "run/detection.json": (RUN, ("detect",)),
    "run/checkpoints/step-00000020/state.json": (RUN, ("load", "init-from", "export", "detect")),
    "run/checkpoints/step-00000020/checksums.json": (RUN, ("load", "init-from", "export", "detect")),
    "export/config.json": (EXPORT, tuple(EXPORT)),
    "export/generator/config.json": (EXPORT, ("fill", "init-from", "export")),
    "export/tokenizer.json": (EXPORT, ("detect", "fill", "score", "encode", "evaluate", "init-from", "export")),
    "export/tokenizer_config.json": (EXPORT, ("detect", "fill", "encode", "export")),
    "export/discern.toml": (EXPORT, ("encode", "evaluate", "init-from")),
    "export/README.md": (EXPORT, ("export",)),
    "export/detection.json": (EXPORT, ("detect",)),
    "finetuned/finetuned.json": (FINETUNED, ("predict", "export")),
    "finetuned/results.json": (FINETUNED, ("predict", "report", "export")),
    "finetuned/seed-0/scores.json": (FINETUNED, ("predict", "export")),
    "finetuned/tokenizer.json": (FINETUNED, ("predict", "export")),
    "finetuned/config.toml": (FINETUNED, ("report",)),
    "finetuned/seed-0/mistakes-own.jsonl": (FINETUNED, ("report",)),
    "task/config.json": (TASK, ("predict",)),
    "data/manifest.json": (DATA, ("train",)),
    "data/tokenizer.json": (DATA, ("train",)),
    "data/token-counts.int64": (DATA, ("train",)),
    "data/train-00000.documents": (DATA, ("train",)),
    "data/train-00000.sentences": (DATA, ("train",)),
}
WHOLE = ("empty", "half", "garbage", "invalid byte", "a list", "a number", "an empty object", "nested")
"""Damages after which no file of ours makes sense, but for these."""
HARMLESS = {
    # A card is any text. Of tables, some may hold nothing, or end early.
    *(("export/README.md", damage) for damage in ("empty", "half", "a list", "a number", "an empty object", "nested")),
    *(("finetuned/config.toml", damage) for damage in ("empty", "half", "a list", "a number", "an empty object", "nested")),
    *((name, "half") for name in ("run/config.toml", "export/discern.toml", "finetuned/seed-0/mistakes-own.jsonl")),
    ("finetuned/seed-0/mistakes-own.jsonl", "empty"),
    ("export/tokenizer_config.json", "an empty object"),
    ("run/blimp.json", "an empty object"),
}
VALUES = ([], "text", None, -1, {"a": 1}, 10**18, 1e308, "x" * 5000)


@dataclass(frozen=True)
class Worlds:
    """A folder of each kind, and the bytes that every file should have."""

    root: Path
    good: dict[str, bytes]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    root = tmp_path_factory.mktemp("worlds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "0")  # what a checksum notices is another test's
        make_run(root / "run")
        export(root / "run", out=root / "export", all_networks=True, progress=Silent(), warn=pytest.fail)
        detector = load_detector(root / "export", pytest.fail)
        kept = {"format": 1, "threshold": 0.7, "wanted_precision": 0.9, "head_fingerprint": head_fingerprint(detector.network)}
        for name in ("run", "export"):
            (root / name / "detection.json").write_text(json.dumps(kept))
        (root / "run" / "evaluation.json").write_text(json.dumps({"step": 20, "rows": 3}))
        (root / "run" / "blimp.json").write_text("{}")
        make_finetuned(root / "finetuned", own=SINGLE)
        (root / "finetuned" / "config.toml").write_text("[train]\n")
        mistakes = [{"text": "the file", "gold": "good", "label": "bad", "badness": 0.75}] * 2
        (root / "finetuned" / "seed-0" / "mistakes-own.jsonl").write_text("".join(json.dumps(line) + "\n" for line in mistakes))
        results = json.loads((root / "finetuned" / "results.json").read_text())
        results |= {"model": "a", "seconds": 2.0, "discern": "1"}
        results["settings"] |= {"finetune.recipe": "electra", "train.sequences_per_step": 4, "optimizer.layer_decay": 0.8}
        (root / "finetuned" / "results.json").write_text(json.dumps(results))
        export_task(root / "finetuned", out=root / "task", progress=Silent())
        prepared(root / "data", root / "run" / "tokenizer.json")
        names = [path for path in root.rglob("*") if path.is_file()]
        yield Worlds(root, {str(path.relative_to(root)): path.read_bytes() for path in names})


def damaged(good: bytes, damage: str) -> bytes:
    """What the file may be after the damage."""
    fixed = {
        "empty": b"",
        "half": good[: len(good) // 2],
        "garbage": bytes(range(128, 256)) * 4,
        "invalid byte": good[: len(good) // 3] + b"\xff" + good[len(good) // 3 + 1 :],
        "a list": b"[]",
        "a number": b"7",
        "an empty object": b"{}",
        "nested": b"[" * 100_000,
    }
    return fixed[damage]


def changed(good: bytes) -> Iterator[bytes]:
    """A record without each of its keys in turn, and with a wrong value under it."""
    record = json.loads(good)
    for left_out in record:
        yield json.dumps({key: value for key, value in record.items() if key != left_out}).encode()
        for value in VALUES:
            yield json.dumps({**record, left_out: value}).encode()


@pytest.fixture
def scratch(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worlds]:
    monkeypatch.setenv(VARIABLE, "0")
    yield worlds
    for name, content in worlds.good.items():
        if (worlds.root / name).read_bytes() != content:
            (worlds.root / name).write_bytes(content)
    for left in ("exported", "again"):
        shutil.rmtree(worlds.root / left, ignore_errors=True)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(name: str, scratch: Worlds) -> None:
    verbs, readers = FILES[name]
    folder, path = scratch.root / name.partition("/")[0], scratch.root / name
    for damage in WHOLE:
        if damage == "invalid byte" and path.parent.name == "data" and path.suffix != ".json":
            continue  # another number, which only its checksum can tell
        path.write_bytes(damaged(scratch.good[name], damage))
        for verb in readers:
            if (name, damage) in HARMLESS:
                with suppress(ConfigError):  # a table that ends in the middle of a key
                    verbs[verb](folder)
                continue
            try:
                with pytest.raises(DiscernError, match=re.escape(path.name)) as caught:
                    verbs[verb](folder)
            except BaseException as problem:
                problem.add_note(f"{damage}, {verb}")
                raise
            assert caught.value.hint


RECORDS = {
    "run/run.json": ("load", "report"),
    "run/evaluation.json": ("report",),
    "run/detection.json": ("detect",),
    "run/checkpoints/step-00000020/state.json": ("load",),
    "export/config.json": ("detect", "encode", "export"),
    "export/tokenizer_config.json": ("encode",),
    "finetuned/finetuned.json": ("predict", "export"),
    "finetuned/results.json": ("report",),
    "finetuned/seed-0/scores.json": ("predict",),
    "task/config.json": ("predict",),
    "data/manifest.json": ("train",),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_lacks_a_key_or_has_a_wrong_value_is_named_where_that_matters(name: str, scratch: Worlds) -> None:
    verbs = FILES[name][0]
    folder, path = scratch.root / name.partition("/")[0], scratch.root / name
    for content in changed(scratch.good[name]):
        path.write_bytes(content)
        for verb in RECORDS[name]:
            try:
                verbs[verb](folder)
            except DiscernError as problem:
                said = str(problem)
            except BaseException as problem:
                problem.add_note(f"{verb}: {content[:300]!r}")
                raise
            else:
                continue
            # What describes weights may also be found to be wrong by the weights.
            assert path.name in said or ".safetensors" in said or "no weight" in said, (verb, content[:300], said)
