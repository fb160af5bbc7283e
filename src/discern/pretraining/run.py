"""Pre-training. Read this module first: it opens a run, puts its parts together and runs the loop.

From here, four files lead to the losses of the generator and the discriminator: training/loop.py, objectives/masked.py,
objectives/rtd.py and objectives/losses.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from discern.config.schema import flatten
from discern.diagnosis.health import (
    HealthMonitor,
    diagnosable_from,
    diagnose_duplicates,
    expectations,
    unusual_findings,
    warning_of,
)
from discern.objectives.base import Objective
from discern.pretraining.opened_run import Run, last_phase, open_run
from discern.pretraining.resolved_run import ResolvedRun, Resume, resolve_run
from discern.pretraining.rows import heldout_stream, training_source
from discern.progress import BudgetProgress, Progress, Silent, warning_to
from discern.storage.output import OutputFolder
from discern.training.average import average_warning
from discern.training.config import NO_STEP_LIMIT, TrainConfig
from discern.training.distributed import Ranks, join_ranks
from discern.training.flops import run_flops
from discern.training.interrupt import StopRequest, leave_if_stopped, stop_on_signals
from discern.training.loop import train, written_record
from discern.training.metrics import TimeBudget, Work
from discern.training.metrics_log import MetricsLog, read_metrics
from discern.training.pretrain_config import PretrainConfig
from discern.training.schedule import step_sizes
from discern.training.state import State, TrainContext


def pretrain(
    config: Path | None = None,
    *,
    data: Path,
    out: Path,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    resume: Resume = "auto",
    device: str = "auto",
    init_from: Path | None = None,
    decay_from: Path | None = None,
    same_precision_as: Mapping[str, Any] | None = None,
    progress: Progress,
) -> dict[str, Any] | None:
    """Train a run to its end. Return the last record of its metrics, or None on ranks that don't write.

    Args:
        config: TOML file of settings, or the folder of a run.
        overrides: settings that override preset and file, as "section.key=value".
        init_from: folder of a model whose weights the run starts from; no preset is needed then.
        decay_from: a run, or a folder of its checkpoints, to continue with a decay of the learning rate.
        same_precision_as: record of the arithmetic of another run, whose precision is used if train.precision is 'auto'.

    Raises:
        ConfigError, DataError: the options are not compatible; nothing has been written.
        CheckpointError, NumericsError: the run had to stop; its last intact checkpoint is kept.
        KeyboardInterrupt, SystemExit(143): the run was asked to stop, and has been saved.
    """
    resolved = resolve_run(
        data=data,
        out=out,
        config=config,
        preset=preset,
        overrides=overrides,
        resume=resume,
        init_from=init_from,
        decay_from=decay_from,
        warn=progress.note,
    )
    with join_ranks(device) as ranks, stop_on_signals() as stop, OutputFolder(resolved.out) as folder:
        run = open_run(resolved, ranks, folder, progress, same_precision_as)
        record = finish_run(run, ranks, stop, progress)
    leave_if_stopped(stop, run.state.step, progress, complete=not run.state.interrupted)
    return record if ranks.writes else None


def finish_run(run: Run, ranks: Ranks, stop: StopRequest, progress: Progress) -> dict[str, Any]:
    """Train the rest of a run. Return the last record of its metrics."""
    out, state = run.resolved.out, run.state
    complete = is_complete(state, run.resolved.config)
    # A run that has done all its steps may still lack its last evaluation.
    lacks_record = state.pending is not None and written_record(out, state, ranks) is None
    if complete and not lacks_record:
        limit = "train.max_steps" if state.step >= run.resolved.config.train.max_steps else "train.max_hours"
        progress.note(f"{out} is complete at step {state.step}: nothing to do; to train longer, raise {limit}")
        return (read_metrics(out) or [{"step": state.step}])[-1] if ranks.writes else {}
    state.finished = complete
    record = _train(run, ranks, stop, progress)
    if run.resolved.config.train.max_hours is not None and not state.interrupted and ranks.writes:
        warning = average_warning(run.resolved.config.train, state.step)  # how many steps fit into the time was not known before
        if warning is not None:
            progress.note(f"warning: {warning}")
        if is_complete(state, run.resolved.config) and state.step < run.resolved.config.train.max_steps:
            progress.note(f"its time was used after {state.step:,} steps; to train longer, raise train.max_hours")
    last = last_phase(run.objective, run.resolved.config)
    if last is not None and state.step <= last[1] and not state.interrupted and ranks.writes:
        progress.note(
            f"warning: the time budget was used up after {state.step:,} steps; phase '{last[0]}' begins after {last[1]:,}, so "
            f"that phase has not been trained. To continue, run the same command with a larger train.max_hours"
        )
    return record


def _train(run: Run, ranks: Ranks, stop: StopRequest, progress: Progress) -> dict[str, Any]:
    """Put the parts together and run the loop."""
    config, data, objective, state = run.resolved.config, run.resolved.data, run.objective, run.state
    out, steps, sizes = run.resolved.out, config.train.max_steps, step_sizes(config.train, config.data)
    display = _timed(progress, config.train, state.seconds) if ranks.writes else Silent()
    metrics_log = None
    if ranks.writes:
        metrics_log = MetricsLog(
            out, state.step, tensorboard=config.train.tensorboard, tracker=config.train.tracker, warn=warning_to(display)
        )
    display.start("pre-training", steps, "steps")
    display.advance(state.step)
    statistics = data.manifest.statistics
    for finding in unusual_findings(diagnose_duplicates(statistics.documents, statistics.duplicates)):
        display.note(warning_of(finding))
    context = TrainContext(
        objective=objective,
        source=training_source(run.resolved),
        heldout=heldout_stream(data, config),
        optimizer=config.optimizer,
        train=config.train,
        ranks=ranks,
        precision=run.precision,
        folder=out,
        metrics_log=metrics_log,
        progress=display,
        stop=stop,
        header={"data_fingerprint": data.fingerprint, "tokenizer_fingerprint": data.tokenizer_fingerprint},
        health_monitor=_health_monitor(config, objective, run.start_norm),
        flops=run_flops(objective, steps, sizes),
        time_budget=_time_budget(run.resolved, state.seconds),
        sizes=sizes,
        compilation=run.compilation,
    )
    try:
        return train(context, state)
    finally:
        display.finish()
        if metrics_log is not None:
            metrics_log.close()


def is_complete(state: State, config: PretrainConfig) -> bool:
    """Whether a run has done all its steps or used all its time."""
    hours = config.train.max_hours
    return state.step >= config.train.max_steps or (hours is not None and state.seconds >= hours * 3600)


def _time_budget(resolved: ResolvedRun, seconds: float) -> TimeBudget | None:
    """The time budget of a run, with the work that the clock schedules."""
    hours = resolved.config.train.max_hours
    if hours is None:
        return None
    return TimeBudget(hours * 3600, clocked_work(resolved), seconds)


def clocked_work(resolved: ResolvedRun) -> list[Work]:
    """Kinds of work whose interval the user has not set. The configuration of a run repeats those of a preset."""
    kinds: tuple[Work, ...] = ("log", "evaluate", "checkpoint")
    asked = resolved.settings.user_set - resolved.settings.repeated
    return [kind for kind in kinds if f"train.{kind}_every_steps" not in asked]


def _timed(progress: Progress, settings: TrainConfig, used: float) -> Progress:
    """Progress in steps, or under a time budget as the fraction of it that is used.

    Args:
        used: seconds of the budget that are already used.
    """
    if settings.max_hours is None:
        return progress
    bound = None if settings.max_steps >= NO_STEP_LIMIT else settings.max_steps
    return BudgetProgress(progress, 3600 * settings.max_hours, used, bound)


def _health_monitor(config: PretrainConfig, objective: Objective, start_norm: float | None) -> HealthMonitor:
    steps = config.train.max_steps
    expected = expectations(objective, steps, flatten(config))
    return HealthMonitor(diagnosable_from(config.optimizer.warmup_steps, steps), expected, start_norm)
