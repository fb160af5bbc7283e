"""`discern pretrain` as a user runs it: real processes."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from discern.artifacts.opening import open_model
from discern.errors import ConfigError, DataError
from discern.pretraining import estimate as module
from discern.pretraining.estimate import estimate
from discern.pretraining.evaluate import evaluate
from discern.pretraining.resume import refuse_another_run
from discern.pretraining.run import clocked_work, plan, pretrain
from discern.progress import Silent
from discern.training import trackers
from discern.training.pretrain_config import read_written_config
from tests.pretraining.commands import Notes, command, run, weights


def test_a_finished_run_says_so(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = run(*command(data, out, 6), "--json")
    again = run(*command(data, out, 6), "--json")
    assert "nothing to do; to train longer, raise train.max_steps" in again.stderr
    assert json.loads(again.stdout) == json.loads(first.stdout)


def test_going_on_with_other_arithmetic_is_said(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(*command(data, out, 3)).returncode == 0
    computed = json.loads((out / "run.json").read_text())["arithmetic"]
    assert computed["device"] == "cpu"
    done = run(*command(data, out, 6), env=os.environ | {"DISCERN_KERNELS": "0"})
    assert done.returncode == 0, done.stderr
    assert ("kernels True -> False" in done.stderr) == computed["kernels"]
    assert "kernels" not in run(*command(data, out, 9), env=os.environ | {"DISCERN_KERNELS": "0"}).stderr


def test_two_processes(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = run(*command(data, out, 6), "--nproc", 2, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 6
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
    refused = run(*command(data, tmp_path / "odd", 6), "--nproc", 3, "--json")
    assert refused.returncode == 2
    assert refused.stderr.count("cannot be divided evenly among 3 processes") == 1
    assert not (tmp_path / "odd").exists()


def test_a_dry_run_is_of_what_is_left_and_of_one_process(data: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": data, "preset": "tiny", "out": tmp_path / "run"}
    whole = estimate(**options, overrides=("train.max_steps=12",))
    half = estimate(**options, overrides=("train.max_steps=12",), processes=2)
    assert half.values["memory_bytes"] < whole.values["memory_bytes"]
    assert "GiB for each process (estimate)" in half.text
    assert half.values["flops"] == whole.values["flops"]
    with pytest.raises(ConfigError, match="cannot be divided evenly among 3 processes"):
        estimate(**options, processes=3)
    assert not list(tmp_path.iterdir()), "a dry run writes nothing"
    pretrain(**options, overrides=("train.max_steps=4",), progress=Silent())
    rest = estimate(**options, overrides=("train.max_steps=12",))
    assert (rest.values["steps"], rest.values["first_step"]) == (8, 4)
    assert rest.values["flops"] == pytest.approx(whole.values["flops"] * 8 / 12)
    assert "8, from step 4 on" in rest.text
    # A run that is complete keeps its own length in its configuration.
    pretrain(**options, overrides=("train.max_steps=3",), progress=Silent())
    assert read_written_config(tmp_path / "run" / "config.toml").train.max_steps == 4
    # What the rows of a step are computed in may change.
    notes = Notes()
    pretrain(**options, overrides=("train.max_steps=6", "train.micro_batch_size=4"), progress=notes)
    assert any("differently (train.micro_batch_size None -> 4): training continues" in line for line in notes.lines)


def test_a_missing_package_is_noticed_before_anything_is_written(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="TensorBoard is not installed"):
        pretrain(data=data, out=tmp_path / "run", preset="tiny", overrides=("train.tensorboard=true",), progress=Silent())
    assert not list(tmp_path.iterdir())


def test_a_dry_run_tells_what_each_optimizer_updates(data: Path, tmp_path: Path) -> None:
    plans = {
        name: estimate(data=data, out=tmp_path / "run", preset="tiny", overrides=(f"optimizer.name={name}", *more))
        for name, more in {"adamw": (), "muon": ("train.weight_average=0.99999",)}.items()
    }
    numbers = plans["adamw"].values["parameters"]
    assert plans["adamw"].values["parameters_by_optimizer"].keys() == {"adamw"}
    shares = plans["muon"].values["parameters_by_optimizer"]
    assert shares["muon"]["parameters"] + shares["adamw"]["parameters"] == numbers
    assert f"# optimizer     muon updates {shares['muon']['tensors']} matrices with" in plans["muon"].text
    # Muon keeps one moment, not two; the average is as large as the weights. Each tensor is rounded up to 512 bytes.
    saved = plans["adamw"].values["memory_bytes"] - plans["muon"].values["memory_bytes"]
    rounding = 512 * sum(share["tensors"] for share in shares.values())
    assert saved == pytest.approx(4 * (shares["muon"]["parameters"] - numbers), abs=rounding)
    assert any("averages over about 100,000 updates" in warning for warning in plans["muon"].values["warnings"])


def test_the_average_is_what_readers_get_and_a_resumed_run_keeps(data: Path, tmp_path: Path) -> None:
    options = ("optimizer.name=muon", "train.weight_average=0.5", "optimizer.schedule=constant", "train.log_every_steps=4")
    options += ("optimizer.warmup_steps=2",)
    for out, lengths in (("whole", (8,)), ("parts", (4, 8))):
        for steps in lengths:
            overrides = (*options, f"train.max_steps={steps}")
            pretrain(data=data, out=tmp_path / out, preset="tiny", overrides=overrides, progress=Silent())
    folders = [tmp_path / out / "checkpoints" / "step-00000008" for out in ("whole", "parts")]
    for name in ("model.safetensors", "average.safetensors", "optimizer.safetensors"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    opened = open_model(tmp_path / "whole", warn=pytest.fail)
    average = load_file(folders[0] / "average.safetensors")
    assert opened.description.endswith("at step 8, average of its weights")
    assert all(torch.equal(tensor, average[name]) for name, tensor in opened.objective.named_parameters())
    assert not torch.equal(average["generator_head.bias"], load_file(folders[0] / "model.safetensors")["generator_head.bias"])
    found = evaluate(tmp_path / "whole", progress=Silent(), warn=pytest.fail)
    last = json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[-1])
    assert found["loss"] == pytest.approx(last["heldout_loss"], rel=1e-6)


def test_a_run_of_another_length_keeps_the_warm_up_that_was_fitted(data: Path, tmp_path: Path) -> None:
    pretrain(data=data, out=tmp_path, preset="tiny", overrides=("train.max_steps=5",), progress=Silent())
    for length in (("train.max_steps=40",), ("train.max_steps=7",), ("train.max_steps=5", "train.max_hours=1")):
        planned = plan(data=data, out=tmp_path, preset="tiny", overrides=length, warn=pytest.fail)
        assert planned.config.optimizer.warmup_steps == 1
        refuse_another_run(tmp_path, planned.data, planned.config, {})


def test_a_run_that_cannot_be_shortened_says_so(data: Path, tmp_path: Path) -> None:
    schedule = ("optimizer.schedule=wsd", "optimizer.warmup_steps=6")
    pretrain(data=data, out=tmp_path, preset="tiny", overrides=(*schedule, "train.max_steps=10"), progress=Silent())
    with pytest.raises(ConfigError) as caught:
        plan(data=data, out=tmp_path, preset="tiny", overrides=("train.max_steps=6", schedule[0]), warn=pytest.fail)
    assert "a warm-up of 6 steps and a decay of 1 need more than the 6 steps of train.max_steps" in caught.value.message


def test_the_clock_of_a_time_budget_is_kept_by_the_configuration_of_a_run(data: Path, tmp_path: Path) -> None:
    intervals = {}
    for name, more in (("preset", ()), ("log", ("train.log_every_steps=3",))):
        overrides = ("train.max_hours=1", "train.max_steps=2", *more)
        pretrain(data=data, out=tmp_path / name, preset="tiny", overrides=overrides, progress=Silent())
        first = plan(data=data, out=tmp_path / "new", preset="tiny", overrides=overrides, warn=pytest.fail)
        again = plan(data=data, out=tmp_path / "new", config=tmp_path / name, warn=pytest.fail)
        intervals[name] = [clocked_work(each) for each in (first, again)]
    assert intervals["preset"] == [["log", "evaluate", "checkpoint"]] * 2
    assert intervals["log"][0] == ["evaluate", "checkpoint"]


def test_a_dry_run_says_how_many_steps_fit_into_the_time(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fastest_product", lambda device, precision: 1e12)
    plans = []
    for hours in (0.001, 0.002):
        limits = (f"train.max_hours={hours}", "train.max_steps=1000000")
        plans.append(estimate(data=data, out=tmp_path / "run", preset="tiny", overrides=limits))
    steps = [planned.values["steps"] for planned in plans]
    assert 1 < steps[0] < 10**6
    assert steps[1] == pytest.approx(2 * steps[0], abs=1)
    assert plans[0].values["estimated_seconds"] == pytest.approx(3.6, rel=0.01)
    assert plans[1].values["flops"] == pytest.approx(2 * plans[0].values["flops"], rel=0.01)
    assert (
        f"# steps         about {steps[0]:,} fit into 0.001 hours (estimate); train.max_steps allows 1,000,000" in plans[0].text
    )


def test_a_run_keeps_the_precision_that_was_measured_when_it_began(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"float32": 1.0, "bfloat16": 2.0}
    monkeypatch.setattr("discern.training.precision.cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr("discern.training.precision.measured", lambda *_: dict(figures))

    def go(out: Path, steps: int) -> dict[str, object]:
        # A constant rate does not depend on the length of the run.
        constant = ("optimizer.schedule=constant", "optimizer.warmup_steps=2")
        settings = (*constant, f"train.max_steps={steps}", "train.precision=auto", "train.checkpoint_every_steps=3")
        pretrain(data=data, out=out, preset="tiny", overrides=settings, progress=Silent())
        record: dict[str, object] = json.loads((out / "run.json").read_text())
        return record

    whole = go(tmp_path / "whole", 6)
    begun = go(tmp_path / "cut", 3)
    assert begun["arithmetic"]["precision"] == "float32"  # type: ignore[index]
    assert begun["precision_milliseconds"] == figures
    figures["bfloat16"] = 0.1  # another machine, or another day
    resumed = go(tmp_path / "cut", 6)
    assert resumed["arithmetic"] == begun["arithmetic"] == whole["arithmetic"]
    assert resumed["precision_milliseconds"] == begun["precision_milliseconds"]
    assert weights(tmp_path / "cut", 6) == weights(tmp_path / "whole", 6)
    assert go(tmp_path / "new", 3)["arithmetic"]["precision"] == "bfloat16"  # type: ignore[index]


def test_it_warns_where_bfloat16_is_emulated(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discern.training.precision.cpu_has_bfloat16", lambda: False)
    for steps, says in ((1, "Set train.precision=float32"), (2, "or start a new run with train.precision=float32")):
        notes = Notes()
        constant = ("optimizer.schedule=constant", "optimizer.warmup_steps=1", f"train.max_steps={steps}")
        pretrain(data=data, out=tmp_path, preset="tiny", overrides=(*constant, "train.precision=bfloat16"), progress=notes)
        assert any("this CPU has no instructions for it, so torch emulates it" in line and says in line for line in notes.lines)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--set", "objective.discrimnator_weight=25"], ["discriminator_weight"]),
        (["--set", "data.sequence_length=100000"], ["100000", "128"]),
        (["--set", "model.num_heads=3"], ["num_heads"]),
        (["--preset", "tyni"], ["tiny"]),
        (["--resume", "must"], ["no checkpoint"]),
        (["--device", "cuda:9"], ["GPU"]),
        (["--data", "/nonexistent"], ["/nonexistent"]),
    ],
)
def test_wrong_input_is_refused_before_anything_is_written(data: Path, tmp_path: Path, more: list[str], says: list[str]) -> None:
    done = run(*command(data, tmp_path / "run", 6, *more))
    assert done.returncode in (1, 2)
    assert all(word in done.stderr for word in says), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_another_run_in_the_folder_is_refused_and_untouched(data: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": data, "out": tmp_path / "run", "preset": "tiny", "progress": Silent()}
    pretrain(**options, overrides=("train.max_steps=3",))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as caught:
        pretrain(**options, overrides=("train.max_steps=9", "optimizer.learning_rate=7e-4", "train.seed=5"))
    assert all(word in caught.value.message for word in ("optimizer.learning_rate", "train.seed", "0.0007"))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    pretrain(**options, overrides=("train.max_steps=3", "train.seed=5"), resume="never")
    assert weights(tmp_path / "run.1", 3) == before[tmp_path / "run" / "checkpoints" / "step-00000003" / "model.safetensors"]


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_folder_of_other_files_is_refused(resume: Any, data: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="holds no run"):
        pretrain(data=data, out=tmp_path, preset="tiny", resume=resume, progress=Silent())
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_all_problems_are_reported_together(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="2 problems") as caught:
        pretrain(data=data, out=tmp_path, preset="tiny", overrides=("train.tensorboard=true",), progress=Silent())
    assert all(says in caught.value.message for says in ("TensorBoard is not installed", "holds no run"))


def test_evaluate(data: Path, tmp_path: Path) -> None:
    overrides = ("train.max_steps=6", "train.checkpoint_every_steps=3")
    pretrain(data=data, out=tmp_path, preset="tiny", overrides=overrides, progress=Silent())
    results = [evaluate(tmp_path, batch_size=size, progress=Silent(), warn=pytest.fail) for size in (32, 5)]
    one, other = ({key: value for key, value in metrics.items() if isinstance(value, float)} for metrics in results)
    assert one == pytest.approx(other, rel=1e-5)
    wanted = "generator_loss generator_accuracy sampled_accuracy discriminator_loss discriminator_accuracy discriminator_auc"
    assert set(wanted.split()) <= one.keys()
    (tmp_path / "checkpoints" / "step-00000006" / "optimizer.safetensors").write_bytes(b"")
    warnings: list[str] = []
    assert evaluate(tmp_path, progress=Silent(), warn=warnings.append)["step"] == 3
    assert "damaged" in warnings[0]


@pytest.mark.slow
def test_compiled_networks_give_the_same_losses(data: Path, tmp_path: Path) -> None:
    # In processes of their own: the shape checks that tests run under are not for the compiler to trace.
    options = ["--set", "model.hidden_dropout=0", "--set", "model.attention_dropout=0", "--set", "train.log_every_steps=1"]
    losses = []
    for name, compiled in (("eager", "false"), ("compiled", "true")):
        done = run(*command(data, tmp_path / name, 5, *options, "--set", f"train.compile={compiled}"), limit=600)
        assert done.returncode == 0, done.stderr
        losses.append([json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_another_data_set_is_refused(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "data")
    pretrain(data=tmp_path / "data", out=tmp_path / "run", preset="tiny", overrides=("train.max_steps=1",), progress=Silent())
    options = ["--train-tokenizer", "bpe", "--vocab-size", "400", "--heldout", "0.1"]
    assert run("prepare", data.parent / "text.txt", "--out", tmp_path / "other", *options).returncode == 0
    with pytest.raises(DataError, match="is a different data set"):
        pretrain(data=tmp_path / "other", out=tmp_path / "run", preset="tiny", progress=Silent())
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "other").rename(tmp_path / "data")
    with pytest.raises(DataError, match=f"an earlier version of {tmp_path / 'data'}, which has changed since"):
        pretrain(data=tmp_path / "data", out=tmp_path / "run", preset="tiny", progress=Silent())


def test_a_path_where_nothing_can_be_written_is_a_clear_error(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        pretrain(data=data, out=tmp_path / "file" / "run", preset="tiny", progress=Silent())


def test_a_run_whose_time_is_over_before_its_last_phase_says_so(data: Path, tmp_path: Path) -> None:
    stages = ("objective.algorithm=two-stage", "objective.generator_size=1.0", "train.max_steps=6")
    notes, again = Notes(), Notes()
    pretrain(data=data, out=tmp_path, preset="tiny", overrides=(*stages, "train.max_hours=1e-9"), progress=notes)
    said = "\n".join(notes.lines)
    assert "the last phase, 'discriminator', begins after 3 steps: train.max_hours may end the run earlier" in said
    assert "the time budget was used up after 1 steps; phase 'discriminator' begins after 3, so that phase" in said
    pretrain(data=data, out=tmp_path, preset="tiny", overrides=stages, progress=again)
    assert "the time budget was used up" not in "\n".join(again.lines)
