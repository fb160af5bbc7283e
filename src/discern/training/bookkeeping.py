"""Work after a step: journal, evaluation and checkpoint; and what a resumed run has to catch up on.

The checkpoint is saved first. An evaluation that fails, or a kill in the middle of it, then loses nothing: the checkpoint says
which line of the journal is still owed, and whether held-out figures belong to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from discern.errors import CheckpointError, DataError, DiscernError
from discern.training import checkpoint
from discern.training.diagnosis import embedding_norm
from discern.training.evaluation import evaluate
from discern.training.journal import HELD_OUT, add_held_out, held_out_figures, lines_of
from discern.training.memory import peak_memory
from discern.training.meter import Meter
from discern.training.optimizer import AdamW
from discern.training.pace import Due, Kind
from discern.training.parallel import Ranks
from discern.training.parts import Parts, State, Watch

Moments = Callable[[], Mapping[str, Tensor]]
"""Gives the optimizer's moments, by parameter name."""


def finish_step(parts: Parts, state: State, optimizer: AdamW, meter: Meter, norm: float, due: Due) -> dict[str, Any] | None:
    """Checkpoint, evaluation and journal, where they are due after this step; gives the line that was written.

    Raises:
        CheckpointError: a checkpoint or the journal could not be written.
        DiscernError: the evaluation failed; what it needs is saved, and the same command repeats it.
    """
    train, step = parts.train, state.step
    ends = state.over and not state.cut
    asked = due.evaluation or (train.evaluate_every_steps > 0 and step % train.evaluate_every_steps == 0)
    evaluates = parts.heldout is not None and (ends or asked)
    saves = state.over or due.checkpoint or step % train.checkpoint_every_steps == 0
    parts.progress.advance(1, **{"loss": f"{meter.last['loss']:.3f}", "tokens/s": f"{meter.speed():,.0f}"})
    if evaluates or ends or due.line or step % train.log_every_steps == 0 or step == 1:
        state.owed = {"line": _line(parts, state, optimizer, meter, norm), "evaluates": evaluates}
        meter.restart()
        state.interval = {}
        _done(parts, "line", meter)
    names = {parameter: name for name, parameter in parts.objective.named_parameters()}

    def moments() -> Mapping[str, Tensor]:
        return optimizer.tensors(names)

    if saves:
        _save(parts, state, moments, meter)
    # Whoever asks it to stop does not want to wait for figures; they are made up for when the run goes on.
    if state.owed is None or (state.cut and evaluates):
        return None
    begin = time.perf_counter()
    with meter.paused():
        record = _settle(parts, state, moments, saved=saves)
    if evaluates:
        _done(parts, "evaluation", meter, time.perf_counter() - begin)
    if state.over and not saves:  # the evaluation was the last that patience waited for
        _save(parts, state, moments, meter)
    return record


def catch_up(parts: Parts, state: State) -> dict[str, Any]:
    """Evaluate and write the line of the journal that the checkpoint was saved before; gives the line.

    A line that was written before the earlier session ended is not made again.
    """
    assert state.owed is not None
    line = written_line(parts.folder, state, parts.ranks, parts.watch)
    if line is None:
        if parts.journal is not None:
            parts.journal.rewind(state.step - 1)
        return _settle(parts, state, lambda: state.optimizer, saved=True)
    if state.owed["evaluates"] and parts.watch is not None:
        _weigh(
            parts,
            parts.watch,
            state,
            lambda: state.optimizer,
            line[parts.watch.metric],
            line.get(f"{HELD_OUT}{parts.watch.loss}"),
        )
    state.owed = None
    return line


def written_line(folder: Path, state: State, ranks: Ranks, watch: Watch | None = None) -> dict[str, Any] | None:
    """The line of the journal that a checkpoint was saved before, where the earlier session still wrote it; None elsewhere."""
    assert state.owed is not None
    lines = lines_of(folder, state.step) if ranks.writes else []
    line: dict[str, Any] | None = ranks.gather(next((line for line in lines if "tokens" in line), None))[0]
    if line is None or not state.owed["evaluates"]:
        return line
    held = held_out_figures(line)
    return line if held and (watch is None or watch.metric in held) else None


def save_checkpoint(parts: Parts, state: State, moments: Moments, folder: Path) -> None:
    """Write a checkpoint of this moment; rank 0 writes, the others wait."""
    # A rank carries what belongs to its own rows; what all carry alike, rank 0 gives.
    carried = parts.ranks.gather_first(parts.objective.carry_state())
    if parts.ranks.writes:
        contents = checkpoint.Contents(
            model=checkpoint.model_tensors(parts.objective),
            optimizer=moments(),
            carry={name: tensor for each in reversed(carried) for name, tensor in each.items()},
            state={
                "step": state.step,
                "tokens": state.tokens,
                "seconds": state.seconds,
                "updates": state.updates,
                "interval": state.interval,
                **({} if state.owed is None else {"owed": state.owed}),
                **({} if parts.watch is None else {"best": state.best, "best_loss": state.best_loss, "waited": state.waited}),
                **parts.header,
            },
        )
        if parts.journal is not None:
            parts.journal.sync()
        checkpoint.save(folder, contents, parts.train.keep_checkpoints)
    parts.ranks.barrier()


def summary(figures: Mapping[str, float]) -> str:
    """Figures in a row."""
    return ", ".join(f"{name} {value:.4f}" for name, value in figures.items())


def _line(parts: Parts, state: State, optimizer: AdamW, meter: Meter, norm: float) -> dict[str, Any]:
    """The line of the journal of this step, without held-out figures."""
    return {
        "step": state.step,
        "tokens": state.tokens,
        "seconds": round(state.seconds, 3),
        "tokens_per_second": round(meter.speed(), 1),
        "learning_rate": optimizer.param_groups[0]["lr"],
        "grad_norm": norm,
        **meter.means(),
        **({} if parts.flops is None else {"flops": round(parts.flops.after(state.step).executed)}),
        "peak_memory_bytes": int(parts.ranks.sum([float(peak_memory(parts.ranks.device))])[0]),
    }


def _save(parts: Parts, state: State, moments: Moments, meter: Meter) -> None:
    begin = time.perf_counter()
    state.interval = meter.interval()
    with meter.paused():
        save_checkpoint(parts, state, moments, parts.folder / "checkpoints")
    _done(parts, "checkpoint", meter, time.perf_counter() - begin)


def _done(parts: Parts, kind: Kind, meter: Meter, cost: float = 0.0) -> None:
    if parts.pace is not None:
        parts.pace.done(kind, meter.seconds(), cost)


def _settle(parts: Parts, state: State, moments: Moments, *, saved: bool) -> dict[str, Any]:
    """Write the line that is owed, with its held-out figures where it has any."""
    assert state.owed is not None
    line: dict[str, Any] = state.owed["line"]
    if state.owed["evaluates"]:
        held = _held_out(parts, state, moments, saved=saved)
        line = add_held_out(line, held)
        parts.progress.note(f"step {state.step}: held out {summary(held)}")
        if parts.watchman is not None:
            for warning in parts.watchman.notes(state.step, held, embedding_norm(parts.objective)):
                parts.progress.note(warning)
        if parts.watch is not None:
            loss = None if parts.watch.loss is None else held[parts.watch.loss]
            _weigh(parts, parts.watch, state, moments, held[parts.watch.metric], loss)
    if parts.journal is not None:
        parts.journal.write(line)
    state.owed = None
    return line


def _held_out(parts: Parts, state: State, moments: Moments, *, saved: bool) -> dict[str, float]:
    """Figures of an evaluation; where it fails, the training up to here is saved."""
    if parts.heldout is None:
        return {}
    try:
        return evaluate(
            parts.objective,
            parts.heldout,
            parts.ranks,
            sequences=parts.train.evaluate_sequences,
            precision=parts.precision,
        )
    except DiscernError as problem:
        if not isinstance(problem, DataError):
            raise
        _fail(parts, state, moments, problem, saved=saved)
    except Exception as problem:  # whatever it is, hours of training should not be lost by it
        _fail(parts, state, moments, problem, saved=saved)


def _fail(parts: Parts, state: State, moments: Moments, problem: Exception, *, saved: bool) -> NoReturn:
    """Save, if that was not done before the evaluation and needs no other rank, and say what went wrong."""
    if not saved and parts.ranks.world == 1:
        try:
            save_checkpoint(parts, state, moments, parts.folder / "checkpoints")
            saved = True
        except CheckpointError as another:
            parts.progress.note(f"warning: {another.message}")
    found = problem.message if isinstance(problem, DataError) else f"{type(problem).__name__}: {' '.join(str(problem).split())}"
    mend = "restore the missing or damaged file, usually a held-out file of the data set"
    if isinstance(problem, DataError) and problem.hint:
        mend = problem.hint
    goes_on = f"repeats only the evaluation, as the weights of step {state.step} are saved" if saved else "continues"
    raise DataError(
        f"step {state.step}: the evaluation on held-out examples failed: {found}", hint=f"{mend}; the same command then {goes_on}"
    ) from problem


def _weigh(parts: Parts, watch: Watch, state: State, moments: Moments, figure: float, loss: float | None) -> None:
    """Keep the weights where the figure is the best so far; end the run where it has not been for too long."""
    tied = figure == state.best and loss is not None and state.best_loss is not None and loss < state.best_loss
    if state.best is None or figure > state.best or tied:
        state.best, state.best_loss, state.waited = figure, loss, 0
        if watch.keep:
            save_checkpoint(parts, state, moments, parts.folder / "best")
        return
    state.waited += 1
    if watch.patience and state.waited >= watch.patience and not state.over:
        state.over = True
        parts.progress.note(f"step {state.step}: no better {watch.metric} in {state.waited} evaluations; training stops")
