"""`discern pretrain`: what it refuses, what it plans, and what it says and leaves behind."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from discern.errors import ConfigError, DataError, DiscernError
from discern.model_files.folder import open_model
from discern.pretraining import estimate as module
from discern.pretraining.estimate import Estimate, estimate
from discern.pretraining.evaluate import evaluate
from discern.pretraining.resume import Resume, refuse_another_run
from discern.pretraining.run import Plan, clocked_work, plan
from discern.progress import Silent
from discern.storage.checksums import write_recorded
from discern.training import metrics as trackers
from discern.training.config import read_written_config
from tests.pretraining.commands import CONSTANT, LIMIT, figures, start, train, weights
from tests.pretraining.test_evaluate import prepared


def estimated(data: Path, out: Path, *overrides: str, processes: int = 1) -> Estimate:
    return estimate(planned(data, out, *overrides), processes=processes)


def planned(data: Path, out: Path, *overrides: str, config: Path | None = None) -> Plan:
    preset = "tiny" if config is None else None
    return plan(data=data, out=out, config=config, preset=preset, overrides=overrides, warn=pytest.fail)


def test_two_processes_write_one_log_and_a_finished_run_says_so(data: Path, tmp_path: Path) -> None:
    with start(data, tmp_path, 2, options=("--nproc", "2", "--json")) as process:
        shown, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert json.loads(shown) == lines[-1]
    assert "nothing to do; to train longer, raise train.max_steps" in train(data, tmp_path, 2)


def test_a_run_that_used_its_time_is_finished(data: Path, tmp_path: Path) -> None:
    said = train(data, tmp_path, 100_000, "train.max_hours=0.0006")
    steps = figures(tmp_path)[-1]["step"]
    assert f"finished: {steps:,} step" in said
    assert "in 2 seconds; to train longer, raise train.max_hours" in said
    assert "100,000" not in said


def test_going_on_with_other_arithmetic_is_said_once(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path, 1)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["arithmetic"]["device"] == "cpu"
    record["arithmetic"]["threads"] += 1
    write_recorded(tmp_path, {"run.json": json.dumps(record)})
    threads = torch.get_num_threads()
    assert f"differently (threads {threads + 1} -> {threads}): training continues" in train(data, tmp_path, 2)
    assert "differently (train.micro_batch_size None -> 4)" in (notes := train(data, tmp_path, 3, "train.micro_batch_size=4"))
    assert "threads" not in notes


def test_a_dry_run_is_of_what_is_left_and_of_one_process(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    whole = estimated(data, out, "train.max_steps=12")
    half = estimated(data, out, "train.max_steps=12", processes=2)
    assert half.values["memory_bytes"] < whole.values["memory_bytes"]
    assert "GiB for each process (estimate)" in half.text
    assert half.values["flops"] == whole.values["flops"]
    with pytest.raises(ConfigError, match="cannot be divided evenly among 3 processes"):
        estimated(data, out, processes=3)
    assert not list(tmp_path.iterdir()), "a dry run writes nothing"
    train(data, out, 4)
    rest = estimated(data, out, "train.max_steps=12")
    assert (rest.values["steps"], rest.values["first_step"]) == (8, 4)
    assert rest.values["flops"] == pytest.approx(whole.values["flops"] * 8 / 12)
    assert "8, from step 4 on" in rest.text
    settings = [line for line in rest.text.splitlines() if line.startswith("setting")]
    assert settings == ["setting       train.max_steps = 12 (--set)"], "not those of the preset"
    train(data, out, 3)
    config = read_written_config(out / "config.toml")
    assert config.train.max_steps == 4, "a complete run keeps its own length in its configuration"


def test_a_dry_run_tells_what_each_optimizer_updates(data: Path, tmp_path: Path) -> None:
    adamw = estimated(data, tmp_path).values
    muon = estimated(data, tmp_path, "optimizer.name=muon", "train.weight_average=0.99999")
    assert adamw["parameters_by_optimizer"].keys() == {"adamw"}
    shares = muon.values["parameters_by_optimizer"]
    assert shares["muon"]["parameters"] + shares["adamw"]["parameters"] == adamw["parameters"]
    assert f"optimizer     muon updates {shares['muon']['tensors']} matrices with" in muon.text
    # Muon keeps one moment, not two; the average is as large as the weights. Each tensor is rounded up to 512 bytes.
    saved = adamw["memory_bytes"] - muon.values["memory_bytes"]
    rounding = 512 * sum(share["tensors"] for share in shares.values())
    assert saved == pytest.approx(4 * (shares["muon"]["parameters"] - adamw["parameters"]), abs=rounding)
    assert any("averages over about 100,000 updates" in warning for warning in muon.values["warnings"])


def test_a_dry_run_says_how_many_steps_fit_into_the_time(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fastest_product", lambda device, precision: 1e12)
    own = ("train.max_steps=1000000", "train.price_per_hour=500")
    one, two = (estimated(data, tmp_path, f"train.max_hours={hours}", *own) for hours in (0.001, 0.002))
    steps = one.values["steps"]
    assert 1 < steps < 10**6
    assert two.values["steps"] == pytest.approx(2 * steps, abs=1)
    assert one.values["estimated_seconds"] == pytest.approx(3.6, rel=0.01)
    assert "cost          about 0.50 (estimate)" in one.text
    assert two.values["flops"] == pytest.approx(2 * one.values["flops"], rel=0.01)
    assert f"about {steps:,} fit into 0.001 hours (estimate); train.max_steps allows 1,000,000" in one.text


def test_readers_get_the_average_of_the_weights(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path, 4, "train.weight_average=0.5")
    last, average = (load_file(tmp_path / f"checkpoints/step-00000004/{name}.safetensors") for name in ("model", "average"))
    opened = open_model(tmp_path, warn=pytest.fail)
    assert opened.description.endswith("at step 4, average of its weights")
    assert all(torch.equal(tensor, average[name]) for name, tensor in opened.objective.named_parameters())
    assert not torch.equal(average["generator_head.bias"], last["generator_head.bias"])
    loss = evaluate(tmp_path, progress=Silent(), warn=pytest.fail)["loss"]
    assert loss == pytest.approx(figures(tmp_path)[-1]["heldout_loss"], rel=1e-6)


def test_the_evaluation_skips_a_damaged_checkpoint(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path, 6)
    (tmp_path / "checkpoints" / "step-00000006" / "optimizer.safetensors").write_bytes(b"")
    warnings: list[str] = []
    assert evaluate(tmp_path, progress=Silent(), warn=warnings.append)["step"] == 3
    assert "damaged" in warnings[0]


def test_a_run_of_another_length_keeps_the_warm_up_that_was_fitted(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path, 5)
    for length in (("train.max_steps=40",), ("train.max_steps=7",), ("train.max_steps=5", "train.max_hours=1")):
        other = planned(data, tmp_path, *length)
        assert other.config.optimizer.warmup_steps == 1
        refuse_another_run(tmp_path, other.data, other.config, {})


def test_a_run_that_cannot_be_shortened_says_so(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path, 10, "optimizer.schedule=wsd", "optimizer.warmup_steps=6")
    with pytest.raises(
        ConfigError, match=r"a warm-up of 6 steps and a decay of 1 need more than the 6 steps of train\.max_steps"
    ):
        planned(data, tmp_path, "train.max_steps=6", "optimizer.schedule=wsd")


def test_the_clock_of_a_time_budget_is_in_the_configuration_of_a_run(data: Path, tmp_path: Path) -> None:
    budget = ("train.max_hours=1", "train.max_steps=1")
    train(data, tmp_path / "run", 1, overrides=budget)
    for same in (planned(data, tmp_path / "new", *budget), planned(data, tmp_path / "new", config=tmp_path / "run")):
        assert clocked_work(same) == ["log", "evaluate", "checkpoint"]
    assert clocked_work(planned(data, tmp_path / "new", *budget, "train.log_every_steps=3")) == ["evaluate", "checkpoint"]


def test_a_run_keeps_the_precision_that_was_measured_when_it_began(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    milliseconds = {"float32": 1.0, "bfloat16": 2.0}
    monkeypatch.setattr("discern.training.execution.cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr("discern.training.execution.measured", lambda *_: dict(milliseconds))

    def precision(name: str, steps: int) -> tuple[str, dict[str, float]]:
        train(data, tmp_path / name, steps, *CONSTANT, "train.precision=auto")
        record = json.loads((tmp_path / name / "run.json").read_text())
        return record["arithmetic"]["precision"], record["precision_milliseconds"]

    begun = precision("run", 2)
    assert begun == ("float32", milliseconds)
    milliseconds["bfloat16"] = 0.1  # another machine, or another day
    assert precision("run", 3) == begun
    assert precision("new", 2) == ("bfloat16", milliseconds)


def test_it_warns_where_bfloat16_is_emulated(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discern.training.execution.cpu_has_bfloat16", lambda: False)
    notes = train(data, tmp_path, 1, "train.precision=bfloat16")
    assert "this CPU has no instructions for it, so torch emulates it" in notes
    assert "train.precision=float32 in a new run" in notes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"overrides": ("objective.discrimnator_weight=25",)}, ["discriminator_weight"]),
        ({"overrides": ("data.sequence_length=100000",)}, ["100000", "128"]),
        ({"overrides": ("model.num_heads=3",)}, ["num_heads"]),
        ({"preset": "tyni"}, ["tiny"]),
        ({"device": "cuda:9"}, ["GPU"]),
        ({"data": Path("/nonexistent")}, ["/nonexistent"]),
    ],
)
def test_wrong_input_is_refused_before_anything_is_written(
    options: Mapping[str, Any], says: list[str], data: Path, tmp_path: Path
) -> None:
    with pytest.raises(DiscernError) as caught:
        train(**{"data": data, "out": tmp_path / "run", "steps": 6} | options)
    assert all(word in f"{caught.value} {caught.value.hint}" for word in says)
    assert not list(tmp_path.iterdir())


def test_another_run_in_the_folder_is_refused_and_untouched(data: Path, tmp_path: Path) -> None:
    train(data, tmp_path / "run", 3)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as caught:
        train(data, tmp_path / "run", 9, "optimizer.learning_rate=7e-4", "train.seed=5")
    assert all(word in caught.value.message for word in ("optimizer.learning_rate", "train.seed", "0.0007"))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    old = weights(tmp_path / "run", 3)
    train(data, tmp_path / "run", 3, "train.seed=5", resume="never")
    assert weights(tmp_path / "run.1", 3) == old


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_all_problems_are_reported_together(resume: Resume, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="2 problems") as caught:
        train(data, tmp_path, 1, "train.tensorboard=true", resume=resume)
    assert all(says in caught.value.message for says in ("TensorBoard is not installed", "holds no run"))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_another_data_set_is_refused(data: Path, tmp_path: Path) -> None:
    first = prepared(tmp_path / "first", data)
    train(first, tmp_path / "run", 1)
    with pytest.raises(DataError, match="is a different data set"):
        train(data, tmp_path / "run", 2)
    first.rename(tmp_path / "before")
    prepared(first, data, heldout=0.3)
    with pytest.raises(DataError, match=f"an earlier version of {first}, which has changed since"):
        train(first, tmp_path / "run", 2)


def test_a_path_where_nothing_can_be_written_is_a_clear_error(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        train(data, tmp_path / "file" / "run", 1)
