import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from discern.corruption.randomness import Randomness
from discern.data.batching.rows import build_packing
from discern.data.batching.stream import ExampleStream
from discern.data.config import DataConfig
from discern.diagnosis.health import Expectations, HealthMonitor
from discern.errors import CheckpointError, NumericsError
from discern.objectives import objectives
from discern.objectives.base import Objective, Phase
from discern.objectives.rtd import ReplacedTokenDetection, RTDConfig
from discern.progress import Silent
from discern.training import checkpoint, evaluation, loop
from discern.training.compilation import Mode
from discern.training.config import OptimizerConfig, TrainConfig
from discern.training.distributed import Ranks
from discern.training.flops import Flops, RunFlops
from discern.training.interrupt import StopRequest
from discern.training.loop import train
from discern.training.metrics_log import MetricsLog, read_metrics
from discern.training.replica import average_warning, averaged, update_average
from discern.training.state import EarlyStopping, State, TrainContext
from discern.types import CorruptedBatch, StepOutput
from tests.support import MODELS, SPECIAL, MemorySplit, random_documents, settings

SPLIT = MemorySplit(random_documents(120, 50, seed=3))


def stream(*, training: bool = True, packing: str = "segments") -> ExampleStream:
    config = DataConfig(sequence_length=24, packing=packing)  # type: ignore[arg-type]
    return ExampleStream(build_packing(SPLIT, SPECIAL, config, 0, training=training), 0, shuffle=training)


def context(folder: Path, objective: Objective | None = None, **options: Any) -> TrainContext:
    folder.mkdir(parents=True, exist_ok=True)
    if objective is None:
        objective = build(options.pop("dropout", 0.1))
    optimizer = {"learning_rate": 5e-3, "warmup_steps": 4} | options.pop("optimizer", {})
    source = options.pop("source", None) or stream()
    defaults = {"max_steps": 12, "sequences_per_step": 8, "checkpoint_every_steps": 5, "log_every_steps": 4}
    return TrainContext(
        objective=objective,
        source=source,
        heldout=stream(training=False),
        optimizer=OptimizerConfig(**optimizer),
        train=TrainConfig(**(defaults | {"evaluate_every_steps": 0, "evaluate_sequences": 10} | options)),
        ranks=Ranks(0, 1, torch.device("cpu")),
        precision="float32",
        folder=folder,
        metrics_log=MetricsLog(folder, 0),
        progress=Silent(),
        stop=StopRequest(),
    )


class Notes(Silent):
    """Keeps what is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def build(dropout: float = 0.1) -> ReplacedTokenDetection:
    objective = ReplacedTokenDetection(RTDConfig(), settings(hidden_dropout=dropout, attention_dropout=dropout))
    objective.initialize(0)
    return objective


def weights(objective: Objective) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in checkpoint.model_tensors(objective).items()}


def resumed(folder: Path, **options: Any) -> tuple[TrainContext, State]:
    contents = checkpoint.load_newest(folder / "checkpoints", pytest.fail)
    assert contents is not None
    objective = build()
    checkpoint.load_model_tensors(objective, contents.model, "here")
    kept = {key: contents.state[key] for key in ("step", "tokens", "seconds", "updates")}
    return context(folder, objective, **options), State(**kept, optimizer=dict(contents.optimizer))


@pytest.mark.parametrize("cut", [1, 5, 7, 11])
def test_a_stopped_and_resumed_run_equals_one_in_a_piece_bit_for_bit(tmp_path: Path, cut: int) -> None:
    whole = context(tmp_path / "whole")
    train(whole, State())

    class StopAt(Silent):
        def __init__(self, request: StopRequest) -> None:
            self.steps, self.request = 0, request

        def advance(self, amount: float, **figures: str) -> None:
            self.steps += 1
            if self.steps == cut - 1:
                self.request.signal = 15

    first = context(tmp_path / "cut")
    object.__setattr__(first, "progress", StopAt(first.stop))
    if cut == 1:
        first.stop.signal = 15
    train(first, State())
    second, state = resumed(tmp_path / "cut")
    assert state.step == cut
    train(second, state)
    expected, got = weights(whole.objective), weights(second.objective)  # type: ignore[arg-type]
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_extending_a_finished_run_continues_from_its_weights(tmp_path: Path) -> None:
    train(context(tmp_path / "run", max_steps=5), State())
    longer, state = resumed(tmp_path / "run", max_steps=9)
    assert train(longer, state)["step"] == 9


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": {"name": "muon", "layer_decay": 0.8}, "weight_average": 0.9},
    "stable-adamw": {"optimizer": {"name": "stable-adamw", "layer_decay": 0.8, "clip_norm": 0.0}},
}
"""Options of a run with another optimizer, by its name."""


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", objectives.names())
def test_every_objective_resumes_bit_for_bit_with_every_optimizer(tmp_path: Path, name: str, optimizer: str) -> None:
    factory = objectives.load(name)

    def fresh() -> Objective:
        objective: Objective = factory(factory.Config(), settings(**MODELS.get(name, {})))
        objective.initialize(0)
        return objective

    chosen = {**OPTIMIZERS[optimizer], "checkpoint_every_steps": 3, "micro_batch_size": 4}
    whole = context(tmp_path, fresh(), max_steps=6, **chosen)
    train(whole, State())
    contents = checkpoint.load(tmp_path / "checkpoints" / "step-00000003")
    kinds = {key.rpartition(".")[2] for key in contents.optimizer}
    assert kinds == {"mean", "square"} | ({"momentum"} if optimizer == "muon" else set())
    again = context(tmp_path / "again", fresh(), max_steps=6, **chosen)
    checkpoint.load_model_tensors(again.objective, contents.model, "here")
    again.objective.load_carry_state(contents.carry)
    train(again, State.from_checkpoint(contents))
    ends = [checkpoint.load(folder / "checkpoints" / "step-00000006") for folder in (tmp_path, tmp_path / "again")]
    assert bool(ends[0].average) == (optimizer == "muon")
    for part in ("model", "average", "optimizer"):
        expected, got = (getattr(end, part) for end in ends)
        assert expected.keys() == got.keys()
        assert all(torch.equal(expected[key], got[key]) for key in expected), part


def test_the_average_is_evaluated_and_the_last_weights_are_trained(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 6, "evaluate_every_steps": 3, "checkpoint_every_steps": 3}
    plain, averaging = context(tmp_path / "plain", **options), context(tmp_path / "average", weight_average=0.9, **options)
    for run in (plain, averaging):
        train(run, State())
    last = [checkpoint.load(folder / "checkpoints" / "step-00000006") for folder in (tmp_path / "plain", tmp_path / "average")]
    assert all(torch.equal(last[0].model[key], last[1].model[key]) for key in last[0].model), "averaging changes no training"
    assert last[0].weights is last[0].model
    assert last[1].weights is last[1].average
    records = [read_metrics(folder)[-1] for folder in (tmp_path / "plain", tmp_path / "average")]
    assert records[0]["loss"] == records[1]["loss"]
    assert records[0]["heldout_loss"] != records[1]["heldout_loss"]
    # The held-out figures are those of a network with the averaged weights.
    objective = build()
    checkpoint.load_model_tensors(objective, last[1].weights, "here")
    found = evaluation.evaluate(objective, stream(training=False), averaging.ranks, sequences=10)
    assert found["loss"] == records[1]["heldout_loss"]


def test_the_average_by_hand(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    kept: dict[str, Tensor] = {}
    for update, value in enumerate((1.0, 3.0, -2.0), start=1):
        nn.init.constant_(model.weight, value)
        update_average(kept, checkpoint.model_tensors(model), 0.5, update)
    assert kept["weight"].item() == pytest.approx((0.25 * 1 + 0.5 * 3 - 2) / 1.75)
    with averaged(model, kept):
        assert torch.equal(model.weight, kept["weight"])
    assert model.weight.item() == -2.0


def test_an_average_that_spans_more_than_the_run_is_warned_of(tmp_path: Path) -> None:
    for steps, decay, warned in ((3, 0.9, True), (10, 0.9, False), (3, 0.0, False)):
        told = Notes()
        train(replace(context(tmp_path / f"{steps}-{decay}", max_steps=steps, weight_average=decay), progress=told), State())
        found = [note for note in told.notes if "weight_average" in note]
        assert len(found) == warned
    assert average_warning(TrainConfig(weight_average=0.999), 200) == (
        "train.weight_average 0.999 averages over about 1,000 updates, but the run has 200: the average still contains its early "
        "weights. Set train.weight_average to a smaller value, or to 0 to use the last weights"
    )


def test_what_muon_updates_is_told_at_the_start(tmp_path: Path) -> None:
    told = Notes()
    train(replace(context(tmp_path, max_steps=1, optimizer={"name": "muon"}), progress=told), State())
    assert told.notes[0].startswith("muon updates 28 matrices with ")
    assert "; adamw updates " in told.notes[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_accumulation_changes_nothing_with_any_optimizer(tmp_path: Path, name: str) -> None:
    results = []
    for folder, size in (("whole", None), ("parts", 3)):
        run = context(tmp_path / folder, dropout=0.0, max_steps=10, micro_batch_size=size, **OPTIMIZERS[name])
        train(run, State())
        results.append(weights(run.objective))
    for key, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][key], rtol=0, atol=1e-5)


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_accumulation_changes_nothing(tmp_path: Path, micro: int) -> None:
    # First-step gradients to 1e-6, weights after ten steps to 1e-5, dropout 0.
    results, norms = [], []
    for name, size in (("whole", None), ("parts", micro)):
        run = context(tmp_path / name, dropout=0.0, micro_batch_size=size, max_steps=10, log_every_steps=1)
        train(run, State())
        results.append(weights(run.objective))  # type: ignore[arg-type]
        norms.append(read_metrics(tmp_path / name)[0])
    assert norms[0]["grad_norm"] == pytest.approx(norms[1]["grad_norm"], rel=1e-5)
    assert norms[0]["loss"] == pytest.approx(norms[1]["loss"], rel=1e-6)
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], rtol=0, atol=1e-5)


def test_the_journal_has_the_agreed_keys(tmp_path: Path) -> None:
    train(context(tmp_path, evaluate_every_steps=8), State())
    records = read_metrics(tmp_path)
    assert [record["step"] for record in records] == [1, 4, 8, 12]
    expected = "step tokens seconds tokens_per_second learning_rate grad_norm loss generator_loss discriminator_loss"
    assert all(set(expected.split()) <= record.keys() for record in records)
    assert all(record["peak_memory_bytes"] > 2**20 for record in records)
    assert "flops" not in records[0]
    held = "generator_accuracy sampled_accuracy discriminator_accuracy discriminator_auc discriminator_precision"
    assert set(held.split()) <= records[-2].keys()
    assert "discriminator_auc" not in records[1]
    assert records[0]["loss"] == pytest.approx(math.log(50) + 50 * math.log(2), rel=0.05)


def test_the_journal_has_the_arithmetic_so_far(tmp_path: Path) -> None:
    flops = RunFlops([(5, Flops(10.0, 0.0)), (7, Flops(100.0, 0.0))])
    train(replace(context(tmp_path), flops=flops), State())
    assert {record["step"]: record["flops"] for record in read_metrics(tmp_path)} == {1: 10.0, 4: 40.0, 8: 350.0, 12: 750.0}


def test_what_ails_a_run_is_told_once(tmp_path: Path) -> None:
    told = Notes()
    train(
        replace(context(tmp_path, evaluate_every_steps=4), health_monitor=HealthMonitor(8, Expectations()), progress=told),
        State(),
    )
    warnings = [note for note in told.notes if note.startswith("warning: ")]
    assert len(warnings) == len({warning.split()[1] for warning in warnings}) > 0
    assert told.notes.index(warnings[0]) > told.notes.index(next(note for note in told.notes if note.startswith("step 8: ")))


def test_lines_beyond_the_checkpoint_are_dropped_when_the_run_goes_on(tmp_path: Path) -> None:
    lines = [{"step": step} for step in (1, 5, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 8, "lo')
    MetricsLog(tmp_path, 5).close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 5]


def test_a_time_budget_stops_the_run_and_saves(tmp_path: Path) -> None:
    record = train(context(tmp_path, max_steps=10**6, max_hours=0.3 / 3600), State())
    assert 0 < record["step"] < 10**6
    assert checkpoint.found(tmp_path / "checkpoints")[0].name == f"step-{record['step']:08d}"


@pytest.mark.parametrize("mode", ["off", "blocks"])
def test_compiling_in_the_first_step_takes_none_of_the_time(mode: Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "compile_encoders", lambda *_: None)
    updates: list[float] = []

    def slow_at_first(*args: Any) -> None:
        time.sleep(0.0 if updates else 1.0)
        updates.append(args[1])

    monkeypatch.setattr(loop, "update", slow_at_first)
    seconds = train(replace(context(tmp_path, max_steps=2), compilation=mode), State())["seconds"]
    assert (seconds < 1) == (mode == "blocks")
    assert len(updates) == 2


def test_a_loss_that_is_not_finite_stops_with_what_is_needed_to_look_into_it(tmp_path: Path) -> None:
    class Breaks(ReplacedTokenDetection):
        def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
            output = super().forward(batch, randomness)
            if randomness.step == 3:
                output.terms["generator"].total.mul_(float("nan"))
            return output

    objective = Breaks(RTDConfig(), settings())
    objective.initialize(0)
    with pytest.raises(NumericsError, match=r"step 3.*examples 24 to 31"):
        train(context(tmp_path, objective), State())
    kept = checkpoint.load(tmp_path / "debug" / "step-00000003")
    assert all(torch.isfinite(tensor).all() for tensor in kept.model.values())
    assert json.loads((tmp_path / "debug" / "failure.json").read_text())["examples"] == [24, 32]


def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoint.save_file

    def save_file(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        if "00000010" in str(path):
            raise OSError(28, "No space left on device")
        real(tensors, path, metadata)

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        train(context(tmp_path), State())
    assert "step-00000005" in (caught.value.hint or "")
    assert checkpoint.load_newest(tmp_path / "checkpoints", pytest.fail) is not None


class TwoPhases(ReplacedTokenDetection):
    """First the generator alone, then the discriminator alone, beginning from a mark on its weights."""

    def phases(self, max_steps: int) -> list[Phase]:
        def mark() -> None:
            with torch.no_grad():
                self.discriminator_head.output.bias.fill_(0.25)

        return [
            Phase("generator", 5, frozenset({"generator"})),
            Phase("discriminator", max_steps - 5, frozenset({"discriminator"}), mark),
        ]


def test_phases_train_what_they_say_and_start_their_optimizer_afresh(tmp_path: Path) -> None:
    def fresh() -> TwoPhases:
        objective = TwoPhases(RTDConfig(tying="none"), settings())
        objective.initialize(0)
        return objective

    objective = fresh()
    start = weights(objective)
    train(context(tmp_path / "one", objective, max_steps=5), State())
    after_one = weights(objective)
    moved = {name.split(".")[0] for name in start if not torch.equal(start[name], after_one[name])}
    assert moved == {"generator", "generator_head"}

    objective = fresh()
    whole = context(tmp_path / "both", objective, max_steps=12, checkpoint_every_steps=5)
    train(whole, State())
    after_both = weights(objective)
    moved = {name.split(".")[0] for name in start if not torch.equal(after_one[name], after_both[name])}
    assert moved == {"discriminator", "discriminator_head"}
    assert after_both["discriminator_head.output.bias"].item() != 0

    # Resumed exactly at the border of the phases, and within the second one.
    for step in (5, 10):
        contents = checkpoint.load(tmp_path / "both" / "checkpoints" / f"step-{step:08d}") if step == 10 else None
        objective = fresh()
        state = State()
        if contents is None:
            train(context(tmp_path / "border", objective, max_steps=5), State())
            contents = checkpoint.load(tmp_path / "border" / "checkpoints" / "step-00000005")
        checkpoint.load_model_tensors(objective, contents.model, "here")
        kept = {key: contents.state[key] for key in ("step", "tokens", "seconds", "updates")}
        state = State(**kept, optimizer=dict(contents.optimizer))
        train(context(tmp_path / f"again{step}", objective, max_steps=12), state)
        assert all(torch.equal(after_both[name], tensor) for name, tensor in weights(objective).items())


def test_what_an_objective_carries_is_in_the_checkpoint(tmp_path: Path) -> None:
    class Carries(ReplacedTokenDetection):
        def carry_state(self) -> dict[str, Tensor]:
            return {"baseline": torch.tensor([0.5])}

    objective = Carries(RTDConfig(), settings())
    objective.initialize(0)
    train(context(tmp_path, objective, max_steps=2), State())
    contents = checkpoint.load_newest(tmp_path / "checkpoints", pytest.fail)
    assert contents is not None
    assert contents.carry["baseline"].item() == 0.5


def test_bfloat16_autocast_trains(tmp_path: Path) -> None:
    run = context(tmp_path, max_steps=3)
    object.__setattr__(run, "precision", "bfloat16")
    assert math.isfinite(train(run, State())["loss"])
    assert all(p.dtype == torch.float32 for p in run.objective.parameters())


def test_the_global_generator_is_left_alone(tmp_path: Path) -> None:
    run = context(tmp_path, max_steps=2)
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    train(run, State())
    assert torch.equal(torch.rand(1), expected)


def test_tensorboard_gets_the_same_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = context(tmp_path, max_steps=4)
    object.__setattr__(run, "metrics_log", MetricsLog(tmp_path, 0, tensorboard=True))
    train(run, State())
    assert run.metrics_log is not None
    run.metrics_log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    expected = [record["loss"] for record in read_metrics(tmp_path)]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(expected, rel=1e-6)


def test_a_journal_on_a_full_disk_says_how_to_go_on(tmp_path: Path) -> None:
    journal = MetricsLog(tmp_path, 0)
    journal._stream = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(CheckpointError, match="No space left") as caught:
        journal.write({"step": 1})
    assert "last checkpoint" in (caught.value.hint or "")
    journal.close()


def test_among_equal_scores_the_lower_loss_is_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    monkeypatch.setattr(loop, "save_checkpoint", lambda context, state, *_: kept.append(state.step))
    running = context(tmp_path)
    for loss, best in (("loss", [0, 1, 3]), (None, [0, 3])):
        kept.clear()
        state, watch = State(), EarlyStopping("f1", patience=2, keep=True, loss="loss" if loss else None)
        # F1 of rare entities is 0 for long while the loss falls: that is no reason to stop.
        for step, (f1, held) in enumerate([(0.0, 3.0), (0.0, 2.0), (0.0, 2.5), (0.4, 2.6), (0.4, 2.7), (0.3, 1.0)]):
            state.step = step
            loop.note_best(running, state, dict, {"f1": f1, "loss": held}, watch)
        assert kept == best
        assert state.finished
