"""What a step leaves behind, and that nothing of it is lost or doubled wherever a run is cut."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from discern.corruption.randomness import Randomness
from discern.data.batching.rows import build_packing
from discern.data.batching.stream import ExampleStream
from discern.data.config import DataConfig
from discern.errors import DataError
from discern.objectives.rtd import ReplacedTokenDetection, RTDConfig
from discern.training import checkpoint, evaluation
from discern.training.interrupt import StopRequest
from discern.training.loop import train
from discern.training.metrics import TimeBudget, Work
from discern.training.metrics_log import MetricsLog, read_metrics
from discern.training.state import EarlyStopping, State, TrainContext
from discern.types import CorruptedBatch, StepOutput
from tests.support import SPECIAL
from tests.support import settings as model_settings
from tests.training.test_loop import SPLIT, Notes, build, context, resumed, weights

TIMING = {"seconds", "tokens_per_second", "data_share", "device_share", "peak_memory_bytes"}
OPTIONS = {"max_steps": 12, "checkpoint_every_steps": 3, "log_every_steps": 4, "evaluate_every_steps": 6}
WATCH = EarlyStopping("discriminator_auc", patience=3, keep=True)


class Killed(BaseException):
    """Stands for kill -9: nothing may catch it."""


def figures(folder: Path) -> list[dict[str, Any]]:
    """The journal without what the clock decides."""
    return [{key: value for key, value in line.items() if key not in TIMING} for line in read_metrics(folder)]


def session(folder: Path, **options: Any) -> tuple[TrainContext, State]:
    """A run as the command begins it, or goes on with it."""
    folder.mkdir(exist_ok=True)
    run = context(folder / "unused", **(OPTIONS | options))
    contents = checkpoint.load_newest(folder / "checkpoints", pytest.fail)
    state = State() if contents is None else State.from_checkpoint(contents)
    if contents is not None:
        checkpoint.load_model_tensors(run.objective, contents.model, "here")
    return replace(run, folder=folder, metrics_log=MetricsLog(folder, state.logged_step), early_stopping=WATCH), state


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Journal and weights of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run, state = session(folder)
    train(run, state)
    return figures(folder), weights(run.objective)  # type: ignore[arg-type]


def before(call: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The call, but its `number`th is killed before it does anything."""
    return _killed(call, number, after=False)


def after(call: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The call, but its `number`th is killed when it is done."""
    return _killed(call, number, after=True)


def _killed(call: Callable[..., Any], number: int, *, after: bool) -> Callable[..., Any]:
    left = [number]

    def stands_for(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and not after:
            raise Killed
        done = call(*args, **options)
        if left[0] == 0:
            raise Killed
        return done

    return stands_for


@pytest.mark.parametrize(
    ("kill", "place", "number"),
    [
        (before, "write", 2),  # of step 4, between two checkpoints
        (after, "write", 2),
        (after, "save", 2),  # of step 6, before its evaluation
        (before, "write", 3),  # of step 6, after the evaluation and its best weights
        (after, "write", 3),
        (before, "save", 4),  # of step 9, after the line of step 8
        (after, "save", 5),  # of step 12, before the last evaluation
    ],
)
def test_a_killed_run_has_the_journal_and_weights_of_one_left_alone(
    tmp_path: Path,
    whole: tuple[list[dict[str, Any]], dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    kill: Callable[..., Any],
    place: str,
    number: int,
) -> None:
    owner: Any = MetricsLog if place == "write" else checkpoint
    with monkeypatch.context() as patch:
        patch.setattr(owner, place, kill(getattr(owner, place), number))
        run, state = session(tmp_path / "run")
        with pytest.raises(Killed):
            train(run, state)
    run, state = session(tmp_path / "run")
    state.finished = state.step >= OPTIONS["max_steps"]
    last = train(run, state)
    assert figures(tmp_path / "run") == whole[0]
    assert {key: value for key, value in last.items() if key not in TIMING} == whole[0][-1]
    got = weights(run.objective)  # type: ignore[arg-type]
    assert all(torch.equal(tensor, got[name]) for name, tensor in whole[1].items())


@pytest.mark.parametrize("stop", [2, 6, 7])  # step 6 is one of an evaluation
def test_a_stopped_run_has_the_journal_of_one_left_alone(
    tmp_path: Path, whole: tuple[list[dict[str, Any]], dict[str, torch.Tensor]], stop: int
) -> None:
    class StopAt(Notes):
        def __init__(self, request: StopRequest) -> None:
            super().__init__()
            self.steps, self.request = 0, request

        def advance(self, amount: float, **figures: str) -> None:
            self.steps += 1
            if self.steps == stop - 1:
                self.request.signal = 1

    run, state = session(tmp_path / "run")
    told = StopAt(run.stop)
    train(replace(run, progress=told), state)
    assert (state.step, state.interrupted) == (stop, True)
    assert not [note for note in told.notes if note.startswith(f"step {stop}: held out")], (
        "who stops it does not want to wait for figures"
    )
    train(*session(tmp_path / "run"))
    assert figures(tmp_path / "run") == whole[0]


@pytest.mark.parametrize("step", [4, 12])
def test_a_failed_evaluation_loses_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    options = {"evaluate_every_steps": 4 if step == 4 else 0}  # there is no checkpoint of step 4 yet
    left, real = [1], evaluation.evaluate

    def torn(*args: Any, **options: Any) -> dict[str, float]:
        left[0] -= 1
        if left[0] == 0:
            raise DataError("shard-0 is damaged")
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "evaluate", torn)
        run, state = session(tmp_path / "run", **options)
        with pytest.raises(DataError, match="shard-0 is damaged"):
            train(run, state)
    run, state = session(tmp_path / "run", **options)
    assert state.step == step
    state.finished = step == 12
    train(run, state)
    expected, begun = session(tmp_path / "whole", **options)
    train(expected, begun)
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")


def test_a_time_budget_is_measured_out_in_points() -> None:
    budget = TimeBudget(1000.0, ("log", "evaluate", "checkpoint"))
    asked = []
    for second in range(1, 1000):
        due = budget.due(second)
        asked.append(due)
        for kind in ("log", "evaluate", "checkpoint"):
            if kind in due:
                budget.done(kind, second, cost=5.0 if kind == "evaluate" else 0.5)  # type: ignore[arg-type]
    assert sum("log" in due for due in asked) == 99
    # 50 seconds are a twentieth of the budget, but one that takes 5 seconds is not done more often than every 100.
    assert sum("evaluate" in due for due in asked) == 10
    assert sum("checkpoint" in due for due in asked) == 19
    assert TimeBudget(1000.0, ()).due(999.0) == set(), "what the user has set is left alone"
    assert "checkpoint" in TimeBudget(360_000.0, ("checkpoint",)).due(1800.0), "half an hour at most is at stake"
    short = 100.0  # of many sessions, each shorter than the wait of 300 seconds
    asked = [TimeBudget(6000.0, ("evaluate",), begin).due(begin + short - 1) for begin in map(float, range(0, 6000, 100))]
    assert sum("evaluate" in due for due in asked) == 0
    ends = [TimeBudget(6000.0, ("evaluate",), begin).due(begin + short) for begin in map(float, range(0, 6000, 100))]
    assert sum("evaluate" in due for due in ends) == 20


def test_a_run_with_a_time_budget_has_a_curve(tmp_path: Path) -> None:
    # Intervals that such a run never reaches, as those of presets are for short budgets.
    options = {"max_steps": 10**6, "max_hours": 1.0 / 3600, "log_every_steps": 10**5, "evaluate_every_steps": 10**5}
    run = replace(context(tmp_path, build(0.0), **options), time_budget=TimeBudget(1.0, ("log", "evaluate")))
    train(run, State())
    lines = read_metrics(tmp_path)
    assert len(lines) > 3
    assert sum("heldout_loss" in line for line in lines) > 1


def test_a_run_that_is_stopped_when_its_time_is_over_is_evaluated(tmp_path: Path) -> None:
    class StopLate(Notes):
        def advance(self, amount: float, **figures: str) -> None:
            run.stop.signal = 2

    options = {"max_steps": 10**6, "max_hours": 1e-9, "log_every_steps": 10**5, "evaluate_every_steps": 10**5}
    run, state = context(tmp_path, build(0.0), **options), State()
    record = train(replace(run, progress=StopLate()), state)
    assert not state.interrupted
    assert "heldout_loss" in record


def test_a_run_that_is_stopped_in_the_step_that_uses_up_its_time_is_not_complete(tmp_path: Path) -> None:
    class Slow(ReplacedTokenDetection):
        def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
            time.sleep(1)
            return super().forward(batch, randomness)

    objective = Slow(RTDConfig(), model_settings())
    objective.initialize(0)
    run, state = context(tmp_path, objective, max_steps=10**6, max_hours=0.5 / 3600), State()
    run.stop.signal = 2
    train(run, state)
    assert state.interrupted
    assert 0 <= state.seconds < 0.5
    assert checkpoint.found(tmp_path / "checkpoints")[0].name == f"step-{state.step:08d}"


def test_rows_that_cannot_be_read_cost_no_training(tmp_path: Path) -> None:
    class Breaks(ExampleStream):
        def batch(self, places: Any, positions: Any) -> Any:
            if places[0] >= 8 * 7 and broken:
                raise DataError("the disk is gone", hint="mount it again")
            return super().batch(places, positions)

    broken = True
    data = DataConfig(sequence_length=24, packing="segments")
    source = Breaks(build_packing(SPLIT, SPECIAL, data, 0, training=True), 0)
    with pytest.raises(DataError, match="the disk is gone"):
        train(context(tmp_path, build(), source=source), State())
    assert [path.name for path in checkpoint.found(tmp_path / "checkpoints")] == ["step-00000007", "step-00000005"]
    broken = False
    again, state = resumed(tmp_path, source=source)
    train(again, state)
    whole = context(tmp_path / "whole", build())
    train(whole, State())
    assert all(torch.equal(tensor, weights(again.objective)[name]) for name, tensor in weights(whole.objective).items())


def test_the_wait_for_the_next_record_begins_before_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Budget(TimeBudget):
        def done(self, kind: Work, seconds: float, cost: float = 0.0) -> None:
            done.append(kind)

    def evaluate(*_: object, **__: object) -> dict[str, float]:
        done.append("evaluating")
        return {"loss": 1.0}

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    options = {"max_steps": 2, "log_every_steps": 2, "checkpoint_every_steps": 2}
    train(replace(context(tmp_path, build(0.0), **options), time_budget=Budget(1000.0, ())), State())
    assert done == ["log", "log", "checkpoint", "evaluating", "evaluate"]
