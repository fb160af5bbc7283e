"""Pre-training: THE PAGE TO READ FIRST. Build the parts, run the loop."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.artifacts.locks import Claim
from discern.config.tree import flatten
from discern.data.mixture import MixedStream
from discern.data.shards import TokenData
from discern.data.source import RowStream, heldout_rows, training_rows
from discern.data.stream import ExampleStream
from discern.data.two_part import TwoPartStream
from discern.errors import CheckpointError, ConfigError, DataError
from discern.objectives.base import Objective
from discern.progress import BudgetProgress, Progress, Silent
from discern.training import checkpoint
from discern.training.bookkeeping import written_line
from discern.training.config import NO_STEP_LIMIT, TrainConfig
from discern.training.diagnosis import ailing, embedding_norm, expectations, judge_duplicates
from discern.training.flops import run_flops
from discern.training.interrupt import StopRequest, stop_on_signals
from discern.training.journal import Journal, read_metrics
from discern.training.loop import train
from discern.training.pace import Kind, Pace
from discern.training.parallel import Ranks, join_ranks
from discern.training.parts import BatchSource, Parts, State
from discern.training.precision import Precision, cpu_has_bfloat16, settle_precision, shape_of
from discern.training.watchman import Watchman, settled_from, warning_of
from discern.workflows.generator_start import start_generator
from discern.workflows.request import PretrainRequest as PretrainRequest
from discern.workflows.request import Settled, settle
from discern.workflows.run_folder import began_with, fill_folder, make_folder, may_hold_run, refuse_another_run
from discern.workflows.runs import (
    CHECKPOINTS,
    arithmetic,
    build_objective,
    check_parameters,
    check_words,
    is_run,
    make_record,
    read_record,
    vocabulary_of,
)
from discern.workflows.settings import PretrainConfig
from discern.workflows.start_weights import Filled, fill

# Share of the rows; half is meant.
_FEWEST_FOLLOW = 0.4


@dataclass(frozen=True)
class Run:
    """A run whose networks are filled and whose folder is its own.

    Attributes:
        filled: what became of the model that it began with; None where it was resumed, or began with none.
        start_norm: mean length of the word embeddings that it began with; None where that is no longer known.
        precision: 'float32' or 'bfloat16'.
    """

    settled: Settled
    objective: Objective
    state: State
    filled: Filled | None
    start_norm: float | None
    precision: str


def pretrain(request: PretrainRequest, progress: Progress) -> dict[str, Any] | None:
    """Run to the end; gives the last record of the journal, or None on ranks that don't write.

    Raises:
        ConfigError, DataError: something doesn't fit; nothing has been written.
        CheckpointError, NumericsError: the run had to stop; its last good checkpoint is in place.
        KeyboardInterrupt, SystemExit(143): it was asked to stop, and has saved.
    """
    settled = settle(request, progress.note)
    with join_ranks(request.device) as ranks, stop_on_signals() as stop, Claim() as claim:
        run = open_run(settled, progress, ranks, claim)
        record = run_to_the_end(run, (ranks, progress, stop))
    leave_if_stopped(stop, run.state, progress)
    return record if ranks.writes else None


def open_run(settled: Settled, progress: Progress, ranks: Ranks, claim: Claim) -> Run:
    """The objective with its weights, on its device; the run's folder says from now on what the run is.

    Raises:
        ConfigError, DataError: something doesn't fit, or another process is using the folder; nothing has been written.
        CheckpointError: the folder's checkpoints are damaged.
    """
    config, data = settled.config, settled.data
    check_shares(config, ranks)
    for dropped in settled.resolved.dropped if ranks.writes else ():
        progress.note(f"{dropped.key} = {dropped.value} of the {dropped.origin} does not apply: {dropped.reason}")
    for name, needed in config.objective.without_effect().items() if ranks.writes else ():
        progress.note(f"objective.{name} = {getattr(config.objective, name)} has no effect: it needs objective.{needed}")
    check_words(config, data)
    for line in notes_on_rows(data, config) if ranks.writes else ():
        progress.note(line)
    check_parameters(config, vocabulary_of(data), ranks.device)
    objective = build_objective(config, vocabulary_of(data))
    last = _last_phase(objective, config)  # refuses what the steps don't suffice for, before anything is written
    if last is not None and ranks.writes:
        progress.note(f"the last phase, '{last[0]}', begins after {last[1]:,} steps: train.max_hours may end the run before")
    # Before it is looked at: what another process writes there would be gone back behind.
    ranks.by_first(lambda: claim.take(settled.request.out))
    run = _start_or_resume(settled, objective, progress, ranks, claim)
    objective.to(ranks.device)
    return run


def run_to_the_end(run: Run, surroundings: tuple[Ranks, Progress, StopRequest]) -> dict[str, Any]:
    """Train what is left of a run; gives the last record of its journal."""
    ranks, progress, _ = surroundings
    out, state = run.settled.request.out, run.state
    complete = is_complete(state, run.settled.config)
    # A run that has had its steps may still lack its last evaluation.
    lacks = state.owed is not None and written_line(out, state, ranks) is None
    if not complete or lacks:
        state.over = complete
        record = _train(run, surroundings)
        last = _last_phase(run.objective, run.settled.config)
        if last is not None and state.step <= last[1] and not state.cut and ranks.writes:
            progress.note(
                f"warning: the time was over after {state.step:,} steps; phase '{last[0]}' begins after {last[1]:,}, so nothing "
                "of it has been trained. To continue, use the same command with a larger train.max_hours"
            )
        return record
    progress.note(f"{out} is complete at step {state.step}: nothing to do; to train longer, raise train.max_steps")
    return (read_metrics(out) or [{"step": state.step}])[-1] if ranks.writes else {}


def _train(run: Run, surroundings: tuple[Ranks, Progress, StopRequest]) -> dict[str, Any]:
    ranks, progress, stop = surroundings
    config, data, objective, state = run.settled.config, run.settled.data, run.objective, run.state
    out = run.settled.request.out
    journal = Journal(out, state.step, tensorboard=config.train.tensorboard) if ranks.writes else None
    steps = config.train.max_steps
    listener = _timed(progress, config.train, state.seconds) if ranks.writes else Silent()
    listener.start("pre-training", steps, "steps")
    listener.advance(state.step)
    statistics = data.manifest.statistics
    for finding in ailing(judge_duplicates(statistics.documents, statistics.duplicates)):
        listener.note(warning_of(finding))
    try:
        return train(
            Parts(
                objective=objective,
                source=_rows(run.settled),
                heldout=heldout_stream(data, config),
                optimizer=config.optimizer,
                train=config.train,
                ranks=ranks,
                precision=run.precision,
                folder=out,
                journal=journal,
                progress=listener,
                stop=stop,
                header={"data_fingerprint": data.fingerprint, "tokenizer_fingerprint": data.tokenizer_fingerprint},
                watchman=_watchman(config, objective, run.start_norm),
                flops=run_flops(objective, steps, config.data.sequence_length, config.train.sequences_per_step),
                pace=_pace(run.settled, state.seconds),
            ),
            state,
        )
    finally:
        listener.finish()
        if journal is not None:
            journal.close()


def _pace(settled: Settled, seconds: float) -> Pace | None:
    """What the clock asks for under a time budget, for the intervals that the user has not set."""
    hours = settled.config.train.max_hours
    if hours is None:
        return None
    kinds: dict[str, Kind] = {"log": "line", "evaluate": "evaluation", "checkpoint": "checkpoint"}
    free = [kind for name, kind in kinds.items() if f"train.{name}_every_steps" not in settled.resolved.user_set]
    return Pace(hours * 3600, free, seconds)


def _last_phase(objective: Objective, config: PretrainConfig) -> tuple[str, int] | None:
    """Name of the last of several phases, and the steps before it, where the clock may end a run before they are done."""
    phases = objective.phases(config.train.max_steps)
    if config.train.max_hours is None or len(phases) == 1:
        return None
    return phases[-1].name, config.train.max_steps - phases[-1].steps


def _timed(progress: Progress, settings: TrainConfig, used: float) -> Progress:
    """Steps of a known number as they are; under a time budget the share of it that is used.

    Args:
        used: seconds of the budget.
    """
    if settings.max_hours is None:
        return progress
    bound = None if settings.max_steps >= NO_STEP_LIMIT else settings.max_steps
    return BudgetProgress(progress, 3600 * settings.max_hours, used, bound)


def _rows(settled: Settled) -> BatchSource:
    """The rows that are trained on: those of the data set, or of two in the share that is asked for."""
    config, replay = settled.config, settled.request.replay
    own = training_stream(settled.data, config)
    if settled.replayed is None or replay is None:
        return own
    other = training_stream(settled.replayed, config)
    assert isinstance(own, ExampleStream)  # others are refused when the request is settled
    assert isinstance(other, ExampleStream)
    return MixedStream(own, other, replay.share)


def is_complete(state: State, config: PretrainConfig) -> bool:
    """Whether a run has had its steps or its time."""
    hours = config.train.max_hours
    return state.step >= config.train.max_steps or (hours is not None and state.seconds >= hours * 3600)


def training_stream(data: TokenData, config: PretrainConfig) -> RowStream:
    """The rows to train on, shuffled, or slot by slot where the objective remembers."""
    slots = config.train.sequences_per_step if config.objective.reads_in_order else None
    return training_rows(data.split("train"), data.special_tokens, config.data, config.train.seed, slots=slots)


def notes_on_rows(data: TokenData, config: PretrainConfig) -> list[str]:
    """What somebody should know of the rows before they are trained on."""
    rows = training_stream(data, config)
    if not isinstance(rows, TwoPartStream) or not getattr(config.objective, "next_sentence_weight", 0):
        return []
    share = rows.follows_share()
    if share > _FEWEST_FOLLOW:
        return []
    return [
        f"B follows A in about {share:.0%} of the rows, not in half: A ends where a sentence does, and in most rows none ends in "
        "time, so that 'no' is right without reading. Prepare the text with a sentence a line, or set a longer "
        "data.sequence_length, or objective.next_sentence_weight=0"
    ]


def heldout_stream(data: TokenData, config: PretrainConfig) -> RowStream | None:
    """Held-out rows in their own order, or None where the data set holds nothing out."""
    split = data.split("heldout")
    if split.num_tokens == 0:
        return None
    return heldout_rows(split, data.special_tokens, config.data)


def _start_or_resume(settled: Settled, objective: Objective, progress: Progress, ranks: Ranks, claim: Claim) -> Run:
    """Fill the networks, from the seed, a model or the newest checkpoint, and make sure that the folder is this run's."""
    request, config, data = settled.request, settled.config, settled.data
    out = request.out
    contents = None
    if request.resume != "never" and is_run(out):
        refuse_another_run(out, settled)
        contents = checkpoint.load_newest(out / CHECKPOINTS, progress.note)
    elif not is_run(out) and not may_hold_run(out):
        raise DataError(f"{out} is not empty and holds no run", hint="choose another --out, or empty the folder")
    if request.resume == "must" and contents is None:
        raise CheckpointError(f"{out} holds no checkpoint to resume from", hint="leave --resume out to start a new run")
    objective.initialise(config.train.seed)
    filled = None
    if settled.start is not None and contents is None:
        filled = fill(objective, settled.start, settled.start.added_pieces(data))
        progress.note(f"beginning with {settled.start.description}{_said(filled)}")
    begin = getattr(config.objective, "generator_checkpoint", None)
    if begin is not None and contents is None:
        start_generator(objective, Path(begin), data.tokenizer_fingerprint, progress.note)
    is_known = contents is None or (settled.start is None and begin is None)  # the seed gives it again, another model does not
    start_norm = embedding_norm(objective) if is_known else None
    ranks.barrier()
    precision = precision_of(settled, ranks)
    if ranks.writes:
        computed = arithmetic(ranks.device, precision.name)
        if contents is not None:
            _note_other_arithmetic(read_record(out).get("arithmetic", computed), computed, progress)
            if precision.name == "bfloat16" and ranks.device.type == "cpu" and not cpu_has_bfloat16():
                progress.note("warning: this run began in bfloat16 and continues in it, but this CPU has no instructions for it")
        make_folder(request, claim, progress)
        fill_folder(out, config, make_record(data, objective, computed) | precision.record() | began_with(settled), data)
    ranks.barrier()
    if contents is None:
        return Run(settled, objective, State(), filled, start_norm, precision.name)
    checkpoint.load_model_tensors(objective, contents.model, str(out))
    objective.load_carry_state(contents.carry)
    progress.note(f"resuming {out} at step {contents.step}")
    return Run(settled, objective, State.of(contents), None, start_norm, precision.name)


def precision_of(settled: Settled, ranks: Ranks) -> Precision:
    """The precision of the run that is there or of one like it, or as this machine computes fastest."""
    request, config = settled.request, settled.config
    known: Mapping[str, Any] | None = request.like
    if request.resume != "never" and is_run(request.out):
        record = read_record(request.out)
        known = {**record.get("arithmetic", {}), **{key: record[key] for key in ("precision_milliseconds",) if key in record}}
    rows = config.train.micro_batch_size or config.train.sequences_per_step // ranks.world
    return settle_precision(config.train.precision, ranks, shape_of(config.model, rows * config.data.sequence_length), known)


def _said(filled: Filled) -> str:
    """What of a run that begins with a model did not come from it."""
    fresh = f"; fresh: {', '.join(filled.fresh)}" if filled.fresh else ""
    return fresh + (f"; {filled.added_tokens:,} added tokens" if filled.added_tokens else "")


def _note_other_arithmetic(before: dict[str, Any], now: dict[str, Any], progress: Progress) -> None:
    """A run goes on exactly only where it is computed as it was."""
    changed = [f"{key} {before[key]} -> {value}" for key, value in now.items() if before.get(key, value) != value]
    if changed:
        progress.note(f"the arithmetic of this run has changed ({', '.join(changed)}): training continues, but not bit for bit")


def check_shares(config: PretrainConfig, ranks: Ranks) -> None:
    """Raise where the sequences of a step cannot be shared evenly."""
    if config.train.sequences_per_step % ranks.world:
        raise ConfigError(
            f"train.sequences_per_step {config.train.sequences_per_step} cannot be shared evenly by {ranks.world} processes",
            hint=f"set it to a multiple of {ranks.world}",
        )


def leave_if_stopped(stop: StopRequest, state: State, progress: Progress) -> None:
    """Exit as the signal asks, now that everything is saved."""
    if stop.requested:
        progress.note(f"stopped and saved at step {state.step}; run the same command to continue")
        if stop.signal == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + (stop.signal or 0))


def _watchman(config: PretrainConfig, objective: Objective, start_norm: float | None) -> Watchman:
    """Warns about unusual figures as soon as they can be judged."""
    steps = config.train.max_steps
    expected = expectations(objective, steps, flatten(config))
    return Watchman(settled_from(config.optimizer.warmup_steps, steps), expected, start_norm)
