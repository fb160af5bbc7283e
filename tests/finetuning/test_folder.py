"""The folder of a fine-tuning: what is complete in it, whose it is, and what is refused there."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from discern.errors import DataError
from discern.finetuning.results import keep_precision, prepare_folder
from discern.progress import Silent
from discern.storage.files import OutputFolder
from discern.training.distributed import Ranks
from tests.small.run import make_run
from tests.small.task import ROWS, Finetuning, Notes, finetune, prepare_finetuning, run, small_request, with_settings, write_csv
from tests.tasks.data_folder import write

ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Finetuning:
    """A fine-tuning of one step, done."""
    request = with_settings(small_request(small_model, tmp_path_factory.mktemp("complete")), "train.max_steps=1")
    run(replace(request, baselines=False))
    return replace(request, baselines=False)


@pytest.fixture
def done(complete: Finetuning, tmp_path: Path) -> Finetuning:
    """A copy of it, which a test may change."""
    shutil.copytree(complete.out, tmp_path / "out")
    return replace(complete, out=tmp_path / "out")


def test_complete_seeds_are_not_trained_again_and_can_be_added(done: Finetuning) -> None:
    scores = done.out / "seed-0" / "scores.json"
    before = scores.stat().st_mtime_ns
    both = run(replace(done, seeds=2))
    assert (both["seeds"], len(both["scores"])) == ([0, 1], 2)
    notes = Notes()
    again = finetune(done, notes)
    assert (again["seeds"], again["scores"]) == ([0, 1], both["scores"])
    assert f"{done.out} already holds seed 1; the results include it" in notes.lines
    assert scores.stat().st_mtime_ns == before
    record = json.loads((done.out / "finetuned.json").read_text())
    assert both["digests"] == record["tasks"]["own"]["digests"]
    assert (set(both["digests"]), both["debug"], record["debug"]) == ({"train", "dev"}, False, False)


def changed_dev(request: Finetuning, folder: Path) -> Finetuning:
    dev = write_csv(folder / "dev.csv", [*ROWS * 3, (ROWS[0][0], ROWS[1][1])])
    return with_settings(request, f"files.dev='{dev}'")


def other_model(request: Finetuning, folder: Path) -> Finetuning:
    make_run(folder / "other", overrides=["model.hidden_size=16", "model.num_heads=2"])
    return replace(request, model=str(folder / "other"))


def other_tokenizer(request: Finetuning, folder: Path) -> Finetuning:
    shutil.copytree(request.model, folder / "cased")
    path = folder / "cased" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["normalizer"]["lowercase"] = False
    path.write_text(json.dumps(tokenizer))
    return replace(request, model=str(folder / "cased"))


def other_task(request: Finetuning, folder: Path) -> Finetuning:
    for split in ("train", "dev"):
        write(folder / "chunk" / f"{split}.txt", "the DT B-NP", "reads VB O", "")
    return replace(request, tasks=[("chunk", folder / "chunk")], overrides=("train.max_steps=1",))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda request, _: with_settings(request, "optimizer.learning_rate=1e-5"), r"optimizer\.learning_rate"),
        (lambda request, _: replace(request, debug=True), "--debug"),
        (changed_dev, "the examples of own, dev"),
        (other_model, "the configuration of the encoder; the model"),
        (other_tokenizer, "the tokenizer"),
        (other_task, "files.label; .* layout of own; .* the tasks"),
    ],
)
def test_another_fine_tuning_is_refused_and_replaced_if_asked_for(
    done: Finetuning, tmp_path: Path, unverified: None, change: Any, difference: str
) -> None:
    other = change(done, tmp_path)
    with pytest.raises(DataError, match=f"holds another fine-tuning, which differs in: {difference}") as error:
        run(other)
    assert error.value.hint == "choose another --out, or --overwrite"
    assert run(done)["seeds"] == [0]
    scores = done.out / "seed-0" / "scores.json"
    before = scores.stat().st_mtime_ns
    assert run(replace(other, overwrite=True))["seeds"] == [0]
    assert scores.stat().st_mtime_ns > before
    with pytest.raises(DataError, match="holds another fine-tuning"):
        run(done)


def test_damaged_or_missing_weights_are_noticed(done: Finetuning) -> None:
    weights = done.out / "seed-0" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + b"\x00")
    with pytest.raises(DataError, match=r"seed-0/model\.safetensors is damaged or was edited"):
        run(done)
    weights.unlink()
    with pytest.raises(DataError, match=r"seed-0/model\.safetensors is missing"):
        run(done)
    shutil.rmtree(weights.parent)
    run(done)
    assert weights.read_bytes() == content


def test_two_processes_do_not_work_in_one_folder(done: Finetuning) -> None:
    before = sorted(path.name for path in done.out.iterdir())
    with OutputFolder(done.out) as other:
        other.acquire()
        with pytest.raises(DataError, match="another process is using"):
            run(replace(done, seeds=2))
    assert sorted(path.name for path in done.out.iterdir()) == before


def test_a_folder_that_was_interrupted_at_the_start_is_continued_and_others_are_refused(done: Finetuning, tmp_path: Path) -> None:
    begun, other = tmp_path / "begun", tmp_path / "other"
    write(begun / "tokenizer.json", "{}")
    write(begun / ".config.toml.partial", "[fine")
    assert run(replace(done, out=begun))["seeds"] == [0]
    write(other / "thesis.txt", "text")
    with pytest.raises(DataError, match="is not empty"):
        run(replace(done, out=other))


class TwoRanks(Ranks):
    """The rank 1 of two, of which rank 0 reports a problem."""

    problem: DataError | None = None

    def gather(self, value: Any, *, waits: bool = False) -> list[Any]:
        return [self.problem, value]


def test_one_rank_prepares_the_folder_and_the_others_follow_it(request_: Finetuning) -> None:
    plan = prepare_finetuning(request_, Silent())
    ranks = TwoRanks(1, 2, torch.device("cpu"))
    write(plan.out / "half-written.csv", "text")
    prepare_folder(plan, ranks, OutputFolder(plan.out))
    ranks.problem = DataError("no space")
    with pytest.raises(DataError, match="no space"):
        prepare_folder(plan, ranks, OutputFolder(plan.out))


def test_all_seeds_have_the_precision_that_was_measured_first(request_: Finetuning, monkeypatch: pytest.MonkeyPatch) -> None:
    milliseconds = {"float32": 1.0, "bfloat16": 0.5}
    monkeypatch.setattr("discern.training.execution.cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr("discern.training.execution.measured", lambda *_: dict(milliseconds))
    plan = prepare_finetuning(with_settings(request_, "train.precision=auto"), Silent())
    for _ in range(2):
        with OutputFolder(plan.out) as folder:
            prepare_folder(plan, ALONE, folder)
        assert keep_precision(plan, ALONE) == "bfloat16"
        record = json.loads((plan.out / "finetuned.json").read_text())
        assert record["arithmetic"]["precision_milliseconds"] == {"float32": 1.0, "bfloat16": 0.5}
        milliseconds["float32"] = 0.1
