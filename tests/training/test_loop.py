import json
import math
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from discern.corruption.randomness import Randomness
from discern.data.batching.rows import training_rows
from discern.data.batching.segments import ExampleStream, SegmentRows
from discern.data.batching.stream import RowStream
from discern.data.config import DataConfig
from discern.diagnosis.health import Expectations, HealthMonitor
from discern.errors import CheckpointError, DataError, NumericsError
from discern.objectives import objectives
from discern.objectives.base import Objective, Phase
from discern.objectives.rtd import ReplacedTokenDetection, RTDConfig
from discern.progress import Silent
from discern.training import checkpoint, evaluation, loop, state as run_state
from discern.training.config import OptimizerConfig, TrainConfig
from discern.training.distributed import Ranks
from discern.training.flops import Flops, RunFlops
from discern.training.loop import train
from discern.training.metrics import MetricsLog, TimeBudget, Work, read_metrics
from discern.training.process import StopRequest
from discern.training.state import EarlyStopping, State, TrainContext, average_warning, averaged, update_average
from discern.types import CorruptedBatch, StepOutput
from tests.pretraining.commands import TIMING, Notes, figures
from tests.support import MODELS, SPECIAL, MemorySplit, random_documents, settings

SPLIT = MemorySplit(random_documents(120, 50, seed=3))


def stream(*, training: bool = True, packing: str = "segments") -> RowStream:
    config = DataConfig(sequence_length=24, packing=packing)  # type: ignore[arg-type]
    return training_rows(SPLIT, SPECIAL, config, 0, training=training)


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


def build(dropout: float = 0.1) -> ReplacedTokenDetection:
    objective = ReplacedTokenDetection(RTDConfig(), settings(hidden_dropout=dropout, attention_dropout=dropout))
    objective.initialize(0)
    return objective


def weights(objective: Objective) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in checkpoint.model_tensors(objective).items()}


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": {"name": "muon", "layer_decay": 0.8}, "weight_average": 0.9},
    "stable-adamw": {"optimizer": {"name": "stable-adamw", "layer_decay": 0.8, "clip_norm": 0.0}},
}
"""Options of a run with another optimizer, by its name."""


@pytest.mark.parametrize(("name", "optimizer"), [*((name, "muon") for name in objectives.names()), ("rtd", "stable-adamw")])
def test_every_objective_resumes_bit_for_bit_with_every_optimizer(tmp_path: Path, name: str, optimizer: str) -> None:
    factory = objectives.load(name)

    def fresh() -> Objective:
        objective: Objective = factory(factory.Config(), settings(**MODELS.get(name, {})))
        objective.initialize(0)
        return objective

    chosen = {**OPTIMIZERS[optimizer], "checkpoint_every_steps": 2, "micro_batch_size": 4}
    whole = context(tmp_path, fresh(), max_steps=4, **chosen)
    train(whole, State())
    contents = checkpoint.load(tmp_path / "checkpoints" / "step-00000002")
    kinds = {key.rpartition(".")[2] for key in contents.optimizer}
    assert kinds == {"mean", "square"} | ({"momentum"} if optimizer == "muon" else set())
    again = context(tmp_path / "again", fresh(), max_steps=4, **chosen)
    checkpoint.load_model_tensors(again.objective, contents.model, "here")
    again.objective.load_carry_state(contents.carry)
    train(again, State.from_checkpoint(contents))
    ends = [checkpoint.load(folder / "checkpoints" / "step-00000004") for folder in (tmp_path, tmp_path / "again")]
    assert bool(ends[0].average) == (optimizer == "muon")
    for part in ("model", "average", "optimizer"):
        expected, got = (getattr(end, part) for end in ends)
        assert expected.keys() == got.keys()
        assert all(torch.equal(expected[key], got[key]) for key in expected), part


def test_the_average_is_evaluated_and_the_last_weights_are_trained(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "evaluate_every_steps": 2}
    last, records = [], []
    for decay in (0.0, 0.9):
        run = context(tmp_path / str(decay), weight_average=decay, **options)
        train(run, State())
        last.append(checkpoint.load(run.folder / "checkpoints" / "step-00000004"))
        records.append(read_metrics(run.folder)[-1])
    assert all(torch.equal(last[0].model[key], last[1].model[key]) for key in last[0].model), "averaging changes no training"
    assert last[0].weights is last[0].model
    assert last[1].weights is last[1].average
    assert records[0]["loss"] == records[1]["loss"]
    assert records[0]["heldout_loss"] != records[1]["heldout_loss"]
    # The held-out figures are those of a network with the averaged weights.
    objective = build()
    checkpoint.load_model_tensors(objective, last[1].average, "here")
    heldout = evaluation.evaluate(objective, stream(training=False), run.ranks, sequences=10)
    assert heldout["loss"] == records[1]["heldout_loss"]


def test_the_average_by_hand(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    average: dict[str, Tensor] = {}
    for update, value in enumerate((1.0, 3.0, -2.0), start=1):
        nn.init.constant_(model.weight, value)
        update_average(average, checkpoint.model_tensors(model), 0.5, update)
    assert average["weight"].item() == pytest.approx((0.25 * 1 + 0.5 * 3 - 2) / 1.75)
    with averaged(model, average):
        assert torch.equal(model.weight, average["weight"])
    assert model.weight.item() == -2.0


def test_an_average_that_spans_more_than_the_run_is_warned_of(tmp_path: Path) -> None:
    progress = Notes()
    train(replace(context(tmp_path, max_steps=3, weight_average=0.9), progress=progress), State())
    assert sum("weight_average" in note for note in progress.lines) == 1
    assert "averages over about 1,000 updates, but the run has 200" in str(
        average_warning(TrainConfig(weight_average=0.999), 200)
    )
    assert not average_warning(TrainConfig(weight_average=0.9), 10)
    assert not average_warning(TrainConfig(weight_average=0.0), 3)


def test_what_muon_updates_is_told_at_the_start(tmp_path: Path) -> None:
    told = Notes()
    train(replace(context(tmp_path, max_steps=1, optimizer={"name": "muon"}), progress=told), State())
    assert told.lines[0].startswith("muon updates 28 matrices with ")
    assert "; adamw updates " in told.lines[0]


@pytest.mark.parametrize(("optimizer", "micro"), [("adamw", 1), ("muon", 3), ("stable-adamw", 3)])
def test_accumulation_changes_nothing(tmp_path: Path, optimizer: str, micro: int) -> None:
    # First-step gradients to 1e-6, weights after six steps to 1e-5, dropout 0.
    results, records = [], []
    for name, size in (("whole", None), ("parts", micro)):
        options = {"micro_batch_size": size, "max_steps": 6, "log_every_steps": 1} | OPTIMIZERS.get(optimizer, {})
        run = context(tmp_path / name, dropout=0.0, **options)
        train(run, State())
        results.append(weights(run.objective))
        records.append(read_metrics(tmp_path / name)[0])
    assert records[0]["grad_norm"] == pytest.approx(records[1]["grad_norm"], rel=1e-5)
    assert records[0]["loss"] == pytest.approx(records[1]["loss"], rel=1e-6)
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], rtol=0, atol=1e-5)


def test_the_journal_has_the_agreed_keys(tmp_path: Path) -> None:
    flops = RunFlops([(5, Flops(10.0, 0.0)), (7, Flops(100.0, 0.0))])
    train(replace(context(tmp_path, evaluate_every_steps=8), flops=flops), State())
    records = read_metrics(tmp_path)
    assert {record["step"]: record["flops"] for record in records} == {1: 10.0, 4: 40.0, 8: 350.0, 12: 750.0}
    expected = "step tokens seconds tokens_per_second learning_rate grad_norm loss generator_loss discriminator_loss"
    assert all(set(expected.split()) <= record.keys() for record in records)
    assert all(record["peak_memory_bytes"] > 2**20 for record in records)
    held = "generator_accuracy sampled_accuracy discriminator_accuracy discriminator_auc discriminator_precision"
    assert set(held.split()) <= records[-2].keys()
    assert "discriminator_auc" not in records[1]
    assert records[0]["loss"] == pytest.approx(math.log(50) + 50 * math.log(2), rel=0.05)


def test_what_ails_a_run_is_told_once(tmp_path: Path) -> None:
    told = Notes()
    train(
        replace(context(tmp_path, evaluate_every_steps=4), health_monitor=HealthMonitor(8, Expectations()), progress=told),
        State(),
    )
    warnings = [note for note in told.lines if note.startswith("warning: ")]
    assert len(warnings) == len({warning.split()[1] for warning in warnings}) > 0
    assert told.lines.index(warnings[0]) > told.lines.index(next(note for note in told.lines if note.startswith("step 8: ")))


@pytest.mark.parametrize("compiled", [False, True])
def test_compiling_in_the_first_step_takes_none_of_the_time(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_state, "compile_encoders", lambda *_: None)
    updates: list[float] = []

    def slow_at_first(*args: Any) -> None:
        time.sleep(0.0 if updates else 1.0)
        updates.append(args[1])

    monkeypatch.setattr(loop, "update", slow_at_first)
    seconds = train(replace(context(tmp_path, max_steps=2), compiled=compiled), State())["seconds"]
    assert (seconds < 1) == compiled
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

    def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
        return {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}

    objective = fresh()
    start = weights(objective)
    train(context(tmp_path / "one", objective, max_steps=5), State())
    after_one = weights(objective)
    assert moved(start, after_one) == {"generator", "generator_head"}
    objective = fresh()
    train(context(tmp_path / "both", objective), State())
    after_both = weights(objective)
    assert moved(after_one, after_both) == {"discriminator", "discriminator_head"}
    assert after_both["discriminator_head.output.bias"].item() != 0
    # Resumed exactly at the border of the phases, and within the second one.
    for folder, step in (("one", 5), ("both", 10)):
        contents = checkpoint.load(tmp_path / folder / "checkpoints" / f"step-{step:08d}")
        objective = fresh()
        checkpoint.load_model_tensors(objective, contents.model, "here")
        train(context(tmp_path / f"again{step}", objective), State.from_checkpoint(contents))
        assert not moved(after_both, weights(objective))


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
    saved: list[int] = []
    monkeypatch.setattr(loop, "save_checkpoint", lambda context, state, *_: saved.append(state.step))
    running = context(tmp_path)
    for loss, best in (("loss", [0, 1, 3]), (None, [0, 3])):
        saved.clear()
        state, watch = State(), EarlyStopping("f1", patience=2, keep=True, loss=loss)
        # F1 of rare entities is 0 for long while the loss falls: that is no reason to stop.
        for step, (f1, held) in enumerate([(0.0, 3.0), (0.0, 2.0), (0.0, 2.5), (0.4, 2.6), (0.4, 2.7), (0.3, 1.0)]):
            state.step = step
            loop.note_best(running, state, dict, {"f1": f1, "loss": held}, watch)
        assert saved == best
        assert state.finished


WATCH = EarlyStopping("discriminator_auc", patience=3, keep=True)
Undisturbed = tuple[list[dict[str, Any]], dict[str, Tensor]]


class Killed(BaseException):
    """Stands for kill -9: nothing may catch it."""


def session(folder: Path, **options: Any) -> tuple[TrainContext, State]:
    """A run as the command begins it, or goes on with it."""
    defaults = {"checkpoint_every_steps": 3, "evaluate_every_steps": 6}
    run = context(folder / "unused", **(defaults | options))
    contents = checkpoint.load_newest(folder / "checkpoints", pytest.fail)
    state = State() if contents is None else State.from_checkpoint(contents)
    if contents is not None:
        checkpoint.load_model_tensors(run.objective, contents.model, "here")
    return replace(run, folder=folder, metrics_log=MetricsLog(folder, state.logged_step), early_stopping=WATCH), state


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Records and weights of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run, state = session(folder)
    train(run, state)
    return figures(folder), weights(run.objective)


def finish(folder: Path, undisturbed: Undisturbed, **options: Any) -> None:
    """Goes on with a run and compares it with the undisturbed one, bit for bit."""
    run, state = session(folder, **options)
    state.finished = state.step == 12
    last = train(run, state)
    assert figures(folder) == undisturbed[0]
    assert {key: value for key, value in last.items() if key not in TIMING} == undisturbed[0][-1]
    trained = weights(run.objective)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in undisturbed[1].items())


@pytest.mark.parametrize(
    ("owner", "method", "number", "after"),
    [
        (MetricsLog, "write", 2, True),  # of step 4, between two checkpoints
        (checkpoint, "save", 2, True),  # of step 6, before its evaluation
        (MetricsLog, "write", 3, False),  # of step 6, after the evaluation and its best weights
        (checkpoint, "save", 4, False),  # of step 9, after the line of step 8
        (checkpoint, "save", 5, True),  # of step 12, before the last evaluation
        (evaluation, "evaluate", 1, False),
    ],
)
def test_a_killed_run_ends_as_one_left_alone(
    tmp_path: Path,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    method: str,
    number: int,
    after: bool,
) -> None:
    calls, real = [0], getattr(owner, method)

    def killed(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == number and not after:
            raise Killed
        result = real(*args, **options)
        if calls[0] == number:
            raise Killed
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, killed)
        with pytest.raises(Killed):
            train(*session(tmp_path))
    finish(tmp_path, undisturbed)


@pytest.mark.parametrize("stop", [1, 6, 7])  # step 6 is one of an evaluation
def test_a_stopped_run_ends_as_one_left_alone(tmp_path: Path, undisturbed: Undisturbed, stop: int) -> None:
    class StopAt(Notes):
        steps = 0

        def advance(self, amount: float, **figures: str) -> None:
            self.steps += 1
            if self.steps == stop - 1:
                run.stop.signal = 1

    run, state = session(tmp_path)
    if stop == 1:
        run.stop.signal = 1
    progress = StopAt()
    train(replace(run, progress=progress), state)
    assert (state.step, state.interrupted) == (stop, True)
    assert not [note for note in progress.lines if note.startswith(f"step {stop}: held out")], "a stop waits for no figures"
    finish(tmp_path, undisturbed)


def test_rows_that_cannot_be_read_cost_no_training(tmp_path: Path, undisturbed: Undisturbed) -> None:
    class Breaks(ExampleStream):
        def batch(self, places: Any, positions: Any) -> Any:
            if places[0] >= 8 * 7:
                raise DataError("the disk is gone", hint="mount it again")
            return super().batch(places, positions)

    source = Breaks(SegmentRows(SPLIT, SPECIAL, DataConfig(sequence_length=24), 0), 0)
    with pytest.raises(DataError, match="the disk is gone"):
        train(*session(tmp_path, source=source))
    assert [path.name for path in checkpoint.found(tmp_path / "checkpoints")] == ["step-00000007", "step-00000006"]
    finish(tmp_path, undisturbed)


def test_a_failed_evaluation_loses_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*args: Any, **options: Any) -> dict[str, float]:
        raise DataError("shard-0 is damaged")

    options = {"evaluate_every_steps": 4, "max_steps": 4}  # the interval of checkpoints has none for step 4
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "evaluate", torn)
        with pytest.raises(DataError, match="shard-0 is damaged"):
            train(*session(tmp_path, **options))
    assert session(tmp_path, **options)[1].step == 4


def test_a_time_budget_spaces_the_records() -> None:
    budget = TimeBudget(1000.0, ("log", "evaluate", "checkpoint"))
    times: Counter[str] = Counter()
    for second in range(1, 1000):
        for kind in budget.due(second):
            budget.done(kind, second, cost=5.0 if kind == "evaluate" else 0.5)
            times[kind] += 1
    # 50 seconds are a twentieth of the budget, but one that takes 5 seconds is not done more often than every 100.
    assert times == {"log": 99, "evaluate": 10, "checkpoint": 19}
    assert TimeBudget(1000.0, ()).due(999.0) == set(), "what the user has set is left alone"
    assert "checkpoint" in TimeBudget(360_000.0, ("checkpoint",)).due(1800.0), "half an hour at most is at stake"
    # Of many sessions, each shorter than the wait of 300 seconds, a third reaches a time of evaluation.
    for seconds, evaluations in ((99, 0), (100, 20)):
        due = [TimeBudget(6000.0, ("evaluate",), begin).due(begin + seconds) for begin in map(float, range(0, 6000, 100))]
        assert sum("evaluate" in kinds for kinds in due) == evaluations


def test_a_run_with_a_time_budget_has_a_curve_and_is_saved(tmp_path: Path) -> None:
    # Intervals that such a run never reaches, as those of presets are for short budgets.
    options = {"max_steps": 10**6, "max_hours": 1.0 / 3600, "log_every_steps": 10**5, "evaluate_every_steps": 10**5}
    record = train(replace(context(tmp_path, **options), time_budget=TimeBudget(1.0, ("log", "evaluate"))), State())
    assert 0 < record["step"] < 10**6
    assert checkpoint.found(tmp_path / "checkpoints")[0].name == f"step-{record['step']:08d}"
    lines = read_metrics(tmp_path)
    assert len(lines) > 3
    assert sum("heldout_loss" in line for line in lines) > 1


def test_a_run_that_is_stopped_when_its_time_is_over_is_evaluated(tmp_path: Path) -> None:
    class StopLate(Silent):
        def advance(self, amount: float, **figures: str) -> None:
            run.stop.signal = 2

    options = {"max_steps": 10**6, "max_hours": 1e-9, "log_every_steps": 10**5, "evaluate_every_steps": 10**5}
    run, state = context(tmp_path, **options), State()
    record = train(replace(run, progress=StopLate()), state)
    assert not state.interrupted
    assert "heldout_loss" in record


def test_the_wait_for_the_next_record_begins_before_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Budget(TimeBudget):
        def done(self, kind: Work, seconds: float, cost: float = 0.0) -> None:
            events.append(kind)

    def evaluate(*_: object, **__: object) -> dict[str, float]:
        events.append("evaluating")
        return {"loss": 1.0}

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    options = {"max_steps": 2, "log_every_steps": 2, "checkpoint_every_steps": 2}
    train(replace(context(tmp_path, **options), time_budget=Budget(1000.0, ())), State())
    assert events == ["log", "log", "checkpoint", "evaluating", "evaluate"]
