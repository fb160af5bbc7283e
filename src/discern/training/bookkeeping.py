"""Work after a step of the training loop: a checkpoint, an evaluation, a record in metrics.jsonl.

The checkpoint is saved first. An evaluation that fails, or a kill while it runs, then costs no training: the checkpoint holds the
pending record and whether an evaluation belongs to it, and the resumed run completes both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from discern.diagnosis.health import embedding_norm
from discern.errors import CheckpointError, DataError, DiscernError, NumericsError
from discern.storage.files import write_text
from discern.training import checkpoint, evaluation
from discern.training.average import averaged
from discern.training.compilation import eager_evaluation
from discern.training.distributed import Ranks
from discern.training.evaluation import ExampleRows
from discern.training.memory import lacks_memory, peak_memory
from discern.training.metrics import Due, StepCounters, StepMeter, Work
from discern.training.metrics_log import HELD_OUT, add_held_out, held_out_metrics, records_of_step
from discern.training.precision import full_weights
from discern.training.state import EarlyStopping, State, TrainContext

_EVALUATED_ROWS = 32

Moments = Callable[[], Mapping[str, Tensor]]
"""Returns the optimizer's moments by parameter name."""


def due_after_step(context: TrainContext, state: State, by_clock: Due) -> Due:
    """The work that follows this step, by the intervals in steps or by the clock."""
    train, step = context.train, state.step
    ends = state.finished and not state.interrupted
    evaluate = context.heldout is not None and (
        ends or by_clock.evaluate or (train.evaluate_every_steps > 0 and step % train.evaluate_every_steps == 0)
    )
    return Due(
        log=evaluate or ends or by_clock.log or step == 1 or step % train.log_every_steps == 0,
        evaluate=evaluate,
        checkpoint=state.finished or by_clock.checkpoint or step % train.checkpoint_every_steps == 0,
    )


def make_record(
    context: TrainContext, state: State, meter: StepMeter, *, rate: float, norm: float, evaluates: bool
) -> dict[str, Any]:
    """The record of this step, which stays pending until its evaluation is done and it is written."""
    line = {
        "step": state.step,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 3),
        "tokens_per_second": round(meter.tokens_per_second(), 1),
        **meter.shares(),
        "learning_rate": rate,
        "grad_norm": norm,
        **meter.means(),
        **({} if context.flops is None else {"flops": round(context.flops.after(state.step).executed)}),
        "peak_memory_bytes": int(context.ranks.sum([float(peak_memory(context.ranks.device))])[0]),
    }
    return {"line": line, "evaluates": evaluates}


@contextmanager
def timed(context: TrainContext, meter: StepMeter, kind: Work) -> Iterator[None]:
    """Stop the clock of the interval during some work, and report the work and its duration to the time budget."""
    begin = time.perf_counter()
    with meter.paused():
        yield
    note_done(context, meter, kind, time.perf_counter() - begin)


def note_done(context: TrainContext, meter: StepMeter, kind: Work, cost: float = 0.0) -> None:
    """Tell the time budget, if there is one, that some work was done by now and took `cost` seconds."""
    if context.time_budget is not None:
        context.time_budget.done(kind, meter.seconds(), cost)


def save_checkpoint(context: TrainContext, state: State, moments: Moments, folder: Path | None = None) -> None:
    """Write a checkpoint of the current state. Rank 0 writes; the others wait.

    Args:
        folder: folder of the checkpoint; by default `checkpoints` in the folder of the run.

    Raises:
        CheckpointError: it could not be written; the earlier checkpoints are intact.
    """
    # Each rank has the memory of its own rows. Tensors that all ranks share come from rank 0, hence the reversed order.
    carried = context.ranks.gather_first(context.objective.carry_state())
    if context.ranks.writes:
        contents = checkpoint.Contents(
            model=full_weights(context.objective, state.masters),
            optimizer=moments(),
            carry={name: tensor for each in reversed(carried) for name, tensor in each.items()},
            state=described_state(context, state),
            average=state.average,
        )
        if context.metrics_log is not None:
            # After a power failure, a checkpoint must not exist without the records before it.
            context.metrics_log.sync()
        checkpoint.save(folder or context.folder / "checkpoints", contents, context.train.keep_checkpoints)
    context.ranks.barrier()


def described_state(context: TrainContext, state: State) -> dict[str, Any]:
    """The state of a run as plain JSON, for a checkpoint."""
    best = {"best": state.best, "best_loss": state.best_loss, "waited": state.evaluations_since_best}
    return {
        "step": state.step,
        "tokens": state.tokens,
        "seconds": state.seconds,
        **({"phase_seconds": state.phase_seconds} if state.phase_seconds else {}),
        "updates": state.updates,
        **({"averaged": state.averaged} if state.averaged else {}),
        "interval": state.interval,
        **({} if state.pending is None else {"owed": state.pending}),
        **({} if context.early_stopping is None else best),
        **context.header,
    }


def evaluate(context: TrainContext, state: State, moments: Moments, *, saved: bool) -> dict[str, float]:
    """Evaluate on held-out rows; keep the best weights and stop early, if the run asks for it. Return the metrics.

    Args:
        saved: whether this step has a checkpoint already; otherwise one is written if the evaluation fails.

    Raises:
        DataError: the evaluation failed; the same command repeats it.
    """
    metrics = _held_out(context, state, moments, saved=saved)
    context.progress.note(f"step {state.step}: held out {summary(metrics)}")
    if context.health_monitor is not None:
        for warning in context.health_monitor.notes(state.step, metrics, embedding_norm(context.objective)):
            context.progress.note(warning)
    stopping = context.early_stopping
    if stopping is not None:
        loss = None if stopping.loss is None else metrics[stopping.loss]
        note_best(context, stopping, state, moments, metrics[stopping.metric], loss)
    return metrics


def log(context: TrainContext, state: State, held_out: Mapping[str, float]) -> dict[str, Any]:
    """Write the pending record to metrics.jsonl, with the metrics of its evaluation if it has one. Return the record.

    Raises:
        CheckpointError: the file could not be written.
    """
    assert state.pending is not None
    record = add_held_out(state.pending["line"], held_out) if state.pending["evaluates"] else state.pending["line"]
    if context.metrics_log is not None:
        context.metrics_log.write(record)
    state.pending = None
    return record


def catch_up(context: TrainContext, state: State) -> dict[str, Any]:
    """Complete the evaluation and the record that were pending when the checkpoint was saved. Return the record.

    A record that the earlier session wrote completely is kept as it is.
    """
    assert state.pending is not None

    def moments() -> Mapping[str, Tensor]:
        return state.optimizer

    stopping, evaluates = context.early_stopping, state.pending["evaluates"]
    record = written_record(context.folder, state, context.ranks, stopping)
    if record is None:
        if context.metrics_log is not None:
            context.metrics_log.rewind(state.step - 1)
        return log(context, state, evaluate(context, state, moments, saved=True) if evaluates else {})
    if evaluates and stopping is not None:
        note_best(context, stopping, state, moments, record[stopping.metric], record.get(f"{HELD_OUT}{stopping.loss}"))
    state.pending = None
    return record


def written_record(folder: Path, state: State, ranks: Ranks, stopping: EarlyStopping | None = None) -> dict[str, Any] | None:
    """The record that was pending in the checkpoint, if the earlier session wrote it completely; otherwise None."""
    assert state.pending is not None
    found = records_of_step(folder, state.step) if ranks.writes else []
    record: dict[str, Any] | None = ranks.gather(next((each for each in found if "tokens" in each), None))[0]
    if record is None or not state.pending["evaluates"]:
        return record
    metrics = held_out_metrics(record)
    return record if metrics and (stopping is None or stopping.metric in metrics) else None


def note_best(
    context: TrainContext, stopping: EarlyStopping, state: State, moments: Moments, value: float, loss: float | None
) -> None:
    """Keep the weights if the metric is the best so far; finish the run if it has not improved for too long."""
    tied = value == state.best and loss is not None and state.best_loss is not None and loss < state.best_loss
    if state.best is None or value > state.best or tied:
        state.best, state.best_loss, state.evaluations_since_best = value, loss, 0
        if stopping.keep:
            save_checkpoint(context, state, moments, context.folder / "best")
        return
    state.evaluations_since_best += 1
    if stopping.patience and state.evaluations_since_best >= stopping.patience and not state.finished:
        state.finished = True
        waited = f"{state.evaluations_since_best} evaluations"
        context.progress.note(f"step {state.step}: {stopping.metric} has not improved for {waited}; training stops")


def stop_at_nonfinite(
    context: TrainContext, state: State, moments: Moments, before: StepCounters, losses: Mapping[str, float]
) -> NoReturn:
    """Keep what is needed to investigate a gradient that is not finite, and stop.

    Args:
        before: how far the run was before the step, to which the state returns: no update has changed the weights since.
        losses: means of the step.

    Raises:
        NumericsError: always.
    """
    state.step, state.tokens, state.updates, state.averaged = before.step, before.tokens, before.updates, before.averaged
    folder = context.folder / "debug"
    examples = context.rows_of(state.step)
    kept = f"the weights before the update are in {folder}"
    try:
        save_checkpoint(context, state, moments, folder)
        if context.ranks.writes:
            details = {"step": state.step, "examples": [examples.start, examples.stop], "losses": losses}
            write_text(folder / "failure.json", json.dumps(details, indent=1) + "\n")
    except (CheckpointError, OSError) as problem:
        kept = f"the weights before the update could not be kept ({problem})"
    raise NumericsError(
        f"step {state.step}: the gradient is not finite; losses {summary(losses)}; "
        f"examples {examples.start} to {examples.stop - 1}",
        hint=f"{kept}; try a lower optimizer.learning_rate or a longer warm-up",
    )


def stop_at_failed_read(context: TrainContext, state: State, save: Callable[[State], None], problem: DataError) -> NoReturn:
    """Save what has been trained, and raise the error of the rows that could not be read.

    With several ranks nothing is saved, as a checkpoint needs all of them.

    Args:
        save: writes a checkpoint.
    """
    step = checkpoint.newest_step(context.folder / "checkpoints", up_to=state.step)
    if context.ranks.world_size == 1 and state.step > step:
        try:
            save(state)
            step = state.step
        except CheckpointError as another:
            context.progress.note(f"warning: {another.message}")
    then = f"continues from step {step}, which is saved" if step else "starts over, as nothing has been saved"
    hint = f"{problem.hint or 'restore what is missing or damaged'}; the same command then {then}"
    raise DataError(f"step {state.step}: {problem.message}", hint=hint) from problem


def summary(metrics: Mapping[str, float]) -> str:
    """Metrics on one line."""
    return ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())


def _held_out(context: TrainContext, state: State, moments: Moments, *, saved: bool) -> dict[str, float]:
    """Return metrics on held-out rows, of the averaged weights if there are any.

    If the evaluation fails, the training so far is saved first.
    """
    if context.heldout is None:
        return {}
    examples = ExampleRows()
    try:
        with averaged(context.objective, state.average), eager_evaluation(context.compilation):
            metrics = evaluation.evaluate(
                context.objective,
                context.heldout,
                context.ranks,
                sequences=context.train.evaluate_sequences,
                batch_size=_evaluated_at_once(context),
                precision=context.precision,
                observer=None if context.metrics_log is None else examples,
            )
    except DiscernError as problem:
        if not isinstance(problem, DataError):
            raise
        _stop_at_failed_evaluation(context, state, moments, problem, saved=saved)
    except Exception as problem:  # no error should cost hours of training
        _stop_at_failed_evaluation(context, state, moments, problem, saved=saved)
    if context.metrics_log is not None:
        context.metrics_log.write_examples(state.step, examples.rows)
    return metrics


def _evaluated_at_once(context: TrainContext) -> int:
    """Number of rows that are evaluated at a time: at most as many as are trained on at a time."""
    return min(_EVALUATED_ROWS, context.train.micro_batch_size or _EVALUATED_ROWS)


def _stop_at_failed_evaluation(
    context: TrainContext, state: State, moments: Moments, problem: Exception, *, saved: bool
) -> NoReturn:
    # With several ranks a checkpoint needs all of them, and the others may be waiting elsewhere.
    if not saved and context.ranks.world_size == 1:
        try:
            save_checkpoint(context, state, moments)
            saved = True
        except CheckpointError as another:
            context.progress.note(f"warning: {another.message}")
    found = problem.message if isinstance(problem, DataError) else f"{type(problem).__name__}: {' '.join(str(problem).split())}"
    mend = "restore the missing or damaged file, which is usually a held-out file of the data set"
    if isinstance(problem, DataError) and problem.hint:
        mend = problem.hint
    elif lacks_memory(problem):
        fewer = max(1, _evaluated_at_once(context) // 2)
        mend = f"evaluate fewer rows at once, as --set train.micro_batch_size={fewer} does"
    then = f"repeats only the evaluation, as the weights of step {state.step} are saved" if saved else "continues"
    raise DataError(
        f"step {state.step}: the evaluation on held-out examples failed: {found}", hint=f"{mend}; the same command then {then}"
    ) from problem
