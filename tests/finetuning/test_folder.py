"""The folder of a fine-tuning: what is complete in it, whose it is, and what is refused there."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from discern.errors import ConfigError, DataError
from discern.finetuning import seed as finetune_seed
from discern.finetuning.folder import keep_precision, prepare_folder
from discern.model_files.export import export
from discern.progress import Silent
from discern.storage.output import OutputFolder
from discern.training import loop
from discern.training.distributed import Ranks
from tests.small.run import make_run
from tests.small.task import ROWS, Finetuning, prepare_finetuning, run, write_csv


def test_what_is_complete_is_not_trained_again_and_seeds_can_be_added(request_: Finetuning) -> None:
    run(request_)
    before = (request_.out / "seed-0" / "scores.json").stat().st_mtime_ns
    results = run(replace(request_, seeds=2))
    assert (request_.out / "seed-0" / "scores.json").stat().st_mtime_ns == before
    assert len(results["scores"]) == 2
    assert results["standard_deviation"] == 0.0


def test_another_task_or_model_or_setting_in_the_same_folder_is_refused(request_: Finetuning, tmp_path: Path) -> None:
    few = replace(request_, overrides=(*request_.overrides, "train.max_steps=2"))
    run(few)
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate"):
        run(replace(few, overrides=(*few.overrides, "optimizer.learning_rate=1e-5")))
    make_run(tmp_path / "other", overrides=["model.hidden_size=16", "model.num_heads=2"])
    with pytest.raises(DataError, match="a different model"):
        run(replace(few, model=str(tmp_path / "other")))
    glue = tmp_path / "RTE"
    glue.mkdir()
    lines = [
        "index\tsentence1\tsentence2\tlabel",
        *(f"{n}\tthe file\treads\tentailment\n{n}\ta\tb\tnot_entailment" for n in range(20)),
    ]
    (glue / "train.tsv").write_text("\n".join(lines) + "\n")
    (glue / "dev.tsv").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match="holds results of own, not of rte"):
        run(replace(few, tasks=[("rte", glue)], overrides=("train.max_steps=2",)))


def test_what_is_complete_is_not_taken_for_other_examples(request_: Finetuning) -> None:
    few = replace(request_, overrides=(*request_.overrides, "train.max_steps=1"))
    first = run(few)
    record = json.loads((few.out / "finetuned.json").read_text())
    assert first["digests"] == record["tasks"]["own"]["digests"]
    assert (set(first["digests"]), first["debug"], record["debug"]) == ({"train", "dev"}, False, False)
    with pytest.raises(ConfigError, match="was fine-tuned without --debug, on the whole files") as caught:
        run(replace(few, debug=True))
    assert str(few.out) in str(caught.value.hint)
    write_csv(few.out.parent / "dev.csv", [*ROWS * 3, (ROWS[0][0], ROWS[1][1])])
    with pytest.raises(DataError, match=r"the files have changed since \(own: dev\)"):
        run(few)


def test_a_seed_whose_weights_are_damaged_or_gone_is_not_called_complete(request_: Finetuning) -> None:
    few = replace(request_, overrides=(*request_.overrides, "train.max_steps=1"))
    run(few)
    weights = few.out / "seed-0" / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + b"\x00")
    with pytest.raises(DataError, match=r"seed-0/model\.safetensors is damaged or was edited"):
        run(few)
    weights.unlink()
    with pytest.raises(DataError, match=r"seed-0/model\.safetensors is missing") as caught:
        run(few)
    assert f"remove {weights.parent}" in str(caught.value.hint)
    shutil.rmtree(weights.parent)
    run(few)
    assert weights.read_bytes() == good


def test_one_rank_looks_and_writes_and_the_others_go_by_it(request_: Finetuning) -> None:
    plan = prepare_finetuning(request_, Silent())
    plan.out.mkdir()
    write_csv(plan.out / "half-written.csv", ROWS)

    class Second(Ranks):
        def gather(self, value: Any, *, waits: bool = False) -> list[Any]:
            return [said, value]

    said: DataError | None = None
    prepare_folder(plan, Second(1, 2, torch.device("cpu")), OutputFolder(plan.out))
    said = DataError("no space")
    with pytest.raises(DataError, match="no space"):
        prepare_folder(plan, Second(1, 2, torch.device("cpu")), OutputFolder(plan.out))
    with pytest.raises(DataError, match="is not empty"):
        prepare_folder(plan, Ranks(0, 1, torch.device("cpu")), OutputFolder(plan.out))


def test_all_seeds_have_the_precision_that_was_measured_first(request_: Finetuning, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"float32": 1.0, "bfloat16": 0.5}
    monkeypatch.setattr("discern.training.precision.cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr("discern.training.precision.measured", lambda *_: dict(figures))
    auto = replace(request_, overrides=(*request_.overrides, "train.precision=auto"))
    plan = prepare_finetuning(auto, Silent())
    alone = Ranks(0, 1, torch.device("cpu"))
    for again in (False, True):
        with OutputFolder(plan.out) as folder:
            prepare_folder(plan, alone, folder)
        assert keep_precision(plan, alone) == "bfloat16", again
        record = json.loads((plan.out / "finetuned.json").read_text())
        assert record["arithmetic"]["precision_milliseconds"] == {"float32": 1.0, "bfloat16": 0.5}
        figures["float32"] = 0.1


def test_complete_seeds_stay_in_the_results_where_fewer_are_asked_for(request_: Finetuning) -> None:
    few = replace(request_, overrides=(*request_.overrides, "train.max_steps=1"))
    three = run(replace(few, seeds=3))
    again = run(few)
    assert (again["seeds"], again["scores"]) == ([0, 1, 2], three["scores"])


def test_two_processes_do_not_work_in_one_folder(request_: Finetuning) -> None:
    few = replace(request_, overrides=(*request_.overrides, "train.max_steps=1"))
    run(few)
    before = sorted(path.name for path in few.out.iterdir())
    with OutputFolder(few.out) as other:
        other.acquire()
        with pytest.raises(DataError, match="another process is using"):
            run(replace(few, seeds=2))
    assert sorted(path.name for path in few.out.iterdir()) == before
    assert len(run(replace(few, seeds=2))["scores"]) == 2


def test_what_was_stopped_while_it_began_begins_again(request_: Finetuning) -> None:
    few = replace(request_, overrides=(*request_.overrides, "train.max_steps=1"))
    few.out.mkdir()
    (few.out / "tokenizer.json").write_text("{}")
    (few.out / ".config.toml.partial").write_text("[fine")
    assert run(few)["seeds"] == [0]


def test_the_same_weights_with_another_tokenizer_or_other_heads_are_another_model(
    request_: Finetuning, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISCERN_VERIFY", "0")  # the export is edited
    folder = tmp_path / "export"
    export(small_model, out=folder, progress=Silent(), warn=pytest.fail)
    few = replace(request_, model=str(folder), overrides=(*request_.overrides, "train.max_steps=1"))
    run(few)
    tokenizer = (few.out / "tokenizer.json").read_bytes()
    for name, changed, says in (
        ("tokenizer.json", ('"lowercase":true', '"lowercase":false'), "a different tokenizer"),
        ("config.json", ('"num_attention_heads": 2', '"num_attention_heads": 1'), "num_heads was 2, is 1"),
    ):
        text = (folder / name).read_text()
        compact = json.dumps(json.loads(text), separators=(",", ":")) if name == "tokenizer.json" else text
        assert changed[0] in compact
        (folder / name).write_text(compact.replace(*changed))
        with pytest.raises(DataError, match=says):
            run(replace(few, seeds=2))
        (folder / name).write_text(text)
    assert (few.out / "tokenizer.json").read_bytes() == tokenizer
    assert len(run(replace(few, seeds=2))["scores"]) == 2


def test_a_seed_that_patience_ended_is_not_trained_on(request_: Finetuning, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ("train.evaluate_every_steps=2", "finetune.patience=2", "optimizer.learning_rate=0.5")
    patient = replace(request_, overrides=(*request_.overrides, *more))

    def cut(*_: object, **__: object) -> None:
        raise KeyError("cut")

    with monkeypatch.context() as patch:
        patch.setattr(finetune_seed, "_evaluate", cut)
        with pytest.raises(KeyError, match="cut"):
            run(patient)
    monkeypatch.setattr(loop, "update", cut)
    assert run(patient)["seeds"] == [0]
