"""Pre-training. Read this module first: it builds the parts of a run and runs the loop.

From here, five files lead to the losses of the generator and the discriminator: training/loop.py, objectives/masked.py,
objectives/rtd/objective.py, objectives/rtd/generators.py and objectives/losses.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern import __version__
from discern.artifacts.run import (
    CHECKPOINTS,
    CONFIG_FILE,
    arithmetic,
    build_objective,
    check_parameters,
    check_words,
    is_run,
    make_record,
    read_record,
    vocabulary_of,
)
from discern.config.tree import flatten
from discern.data.batching.mixture import MixedStream
from discern.data.batching.rows import RowStream, heldout_rows
from discern.data.batching.stream import ExampleStream
from discern.data.batching.successive import SuccessiveRows, scheduled_rows
from discern.data.batching.two_part import TwoPartStream
from discern.data.dataset.shards import TokenData
from discern.errors import CheckpointError, ConfigError
from discern.models.span_attention import attention_path
from discern.objectives.base import Objective
from discern.pretrain.decay import RECORD_KEY, risen_rate, write_start
from discern.pretrain.resolved_run import (
    ResolvedRun,
    Resume,
    fill_folder,
    make_folder,
    refuse_another_run,
    refuse_other_files,
    resolve_run,
    start_record,
)
from discern.pretrain.warm_start import Filled, added_pieces, fill, start_generator
from discern.progress import BudgetProgress, Progress, Silent, warning_to
from discern.storage.output import OutputFolder
from discern.training import checkpoint
from discern.training.agreement import check_ranks
from discern.training.average import average_warning
from discern.training.bookkeeping import written_record
from discern.training.clock import TimeBudget, Work
from discern.training.compilation import Mode, Workload, shared_compilation
from discern.training.config import NO_STEP_LIMIT, TrainConfig
from discern.training.context import BatchSource, State, TrainContext
from discern.training.diagnosis import diagnose_duplicates, embedding_norm, unusual_findings
from discern.training.expectations import expectations
from discern.training.flops import run_flops
from discern.training.health import HealthMonitor, diagnosable_from, warning_of
from discern.training.interrupt import StopRequest, leave_if_stopped, stop_on_signals
from discern.training.loop import train
from discern.training.metrics_log import MetricsLog, read_metrics
from discern.training.parallel import Ranks, join_ranks
from discern.training.precision import Precision, cpu_has_bfloat16, shape_of, shared_precision
from discern.training.pretrain_config import PretrainConfig, read_written_config
from discern.training.rank_environment import lock_patience
from discern.training.replica import check_groups
from discern.training.schedule import unused_by_schedule
from discern.training.step_sizes import step_sizes
from discern.training.trackers import check_tracker
from discern.training.weight_precision import check_weight_precision

# With a smaller fraction of rows in which B follows A (half is intended), the next-sentence task is hardly learned.
_LEAST_FOLLOWING = 0.4


@dataclass(frozen=True)
class Run:
    """A run whose networks have their weights and whose folder is locked.

    Attributes:
        filled: how the weights of a model were used; None if the run was resumed or started from random weights.
        start_norm: mean norm of the initial word embeddings; None if unknown.
        precision: 'float32' or 'bfloat16'.
        compilation: how the networks are compiled.
    """

    resolved: ResolvedRun
    objective: Objective
    state: State
    filled: Filled | None
    start_norm: float | None
    precision: str
    compilation: Mode


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
    leave_if_stopped(stop, run.state.step, progress)
    return record if ranks.writes else None


def open_run(
    resolved: ResolvedRun,
    ranks: Ranks,
    folder: OutputFolder,
    progress: Progress,
    same_precision_as: Mapping[str, Any] | None = None,
) -> Run:
    """Build the objective with its weights on its device, and write the files that describe the run into its folder.

    Raises:
        ConfigError, DataError: the options are not compatible, or another process is using the folder; nothing was written.
        CheckpointError: the folder's checkpoints are damaged.
    """
    config, data = resolved.config, resolved.data
    check_tracker(config.train.tracker)
    check_weight_precision(config.train, ranks)
    check_shares(config, ranks)
    check_groups(config.train, ranks)
    own = {"data_set": data.fingerprint, "tokenizer": data.tokenizer_fingerprint, "version": __version__}
    check_ranks(ranks, resolved.out, config, **own, **(_origins(resolved) if ranks.world_size > 1 else {}))
    check_words(config, data)
    if ranks.writes:
        for line in _notes(resolved):
            progress.note(line)
    check_parameters(config, vocabulary_of(data), ranks.device)
    objective = build_objective(config, vocabulary_of(data))
    last = _last_phase(objective, config)  # refuses a run that is too short, before anything is written
    if last is not None and ranks.writes:
        progress.note(f"the last phase, '{last[0]}', begins after {last[1]:,} steps: train.max_hours may end the run earlier")
    # Locked before it is read: another process could otherwise write a newer checkpoint in between.
    ranks.run_on_rank_zero(lambda: folder.acquire(lock_patience()))
    run = _start_or_resume(resolved, objective, ranks, folder, progress, same_precision_as)
    objective.to(ranks.device)
    return run


def _origins(resolved: ResolvedRun) -> dict[str, str]:
    """What else a run is made from, for ranks to compare: the weights that it starts from, and the text that is mixed in."""
    record = start_record(resolved)
    found = {"model to start from": record["start"]["weights"]} if "start" in record else {}
    return found | ({"replayed data set": record["replay"]["data_fingerprint"]} if "replay" in record else {})


def finish_run(run: Run, ranks: Ranks, stop: StopRequest, progress: Progress) -> dict[str, Any]:
    """Train the rest of a run. Return the last record of its metrics."""
    out, state = run.resolved.out, run.state
    complete = is_complete(state, run.resolved.config)
    # A run that has done all its steps may still lack its last evaluation.
    lacks_record = state.pending is not None and written_record(out, state, ranks) is None
    if complete and not lacks_record:
        progress.note(f"{out} is complete at step {state.step}: nothing to do; to train longer, raise train.max_steps")
        return (read_metrics(out) or [{"step": state.step}])[-1] if ranks.writes else {}
    state.finished = complete
    record = _train(run, ranks, stop, progress)
    if run.resolved.config.train.max_hours is not None and not state.interrupted and ranks.writes:
        warning = average_warning(run.resolved.config.train, state.step)  # how many steps fit into the time was not known before
        if warning is not None:
            progress.note(f"warning: {warning}")
    last = _last_phase(run.objective, run.resolved.config)
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
        source=_rows(run.resolved),
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


def _start_or_resume(
    resolved: ResolvedRun,
    objective: Objective,
    ranks: Ranks,
    folder: OutputFolder,
    progress: Progress,
    same_precision_as: Mapping[str, Any] | None,
) -> Run:
    """Give the networks their weights, from the seed, a model or the newest checkpoint, and claim the folder for the run."""
    config, data, out, decay = resolved.config, resolved.data, resolved.out, resolved.decay
    contents, earlier = None, {}
    if resolved.resume != "never" and is_run(out):
        refuse_another_run(resolved)
        contents = checkpoint.load_newest(out / CHECKPOINTS, progress.note)
        earlier = read_record(out)
        warning = None if contents is None else risen_rate(read_written_config(out / CONFIG_FILE), config, contents.step)
        if warning is not None:
            progress.note(f"warning: {warning}")
    else:
        refuse_other_files(folder)
    if resolved.resume == "must" and contents is None:
        raise CheckpointError(f"{out} has no checkpoint to resume from", hint="leave out --resume to start a new run")
    if contents is not None:
        decay = None
    elif decay is not None:
        contents, earlier = decay.contents, dict(decay.record)
    objective.initialize(config.train.seed)
    filled = None
    if resolved.start is not None and contents is None:
        filled = fill(objective, resolved.start, added_pieces(resolved.start, data))
        progress.note(f"starting from {resolved.start.description}{_fresh_parts(filled)}")
    generator_from = config.objective.generator_source
    if generator_from is not None and contents is None:
        start_generator(objective, Path(generator_from), data.tokenizer_fingerprint, progress.note)
    # Random weights can be recomputed from the seed; those of another model are not stored.
    began = start_record(resolved) | {key: earlier[key] for key in (RECORD_KEY,) if key in earlier and decay is None}
    foreign = resolved.start is not None or generator_from is not None or "start" in began.get(RECORD_KEY, {})
    is_known = contents is None or not foreign
    start_norm = embedding_norm(objective) if is_known else None
    ranks.barrier()
    precision = precision_of(resolved, ranks, same_precision_as)
    compilation = shared_compilation(
        config.train.compile, ranks, workload_of(config, ranks, precision.name), earlier.get("arithmetic")
    )
    if ranks.writes:
        computed = arithmetic(ranks.device, precision.name, objective, ranks.world_size)
        path = attention_path(objective, ranks.device, precision.name)
        if path is not None:
            progress.note(path.note)
        if config.train.compile:
            computed["compile"] = compilation.mode
            progress.note(compilation.note)
        if contents is not None:
            _note_changed_arithmetic(earlier.get("arithmetic", computed), computed, progress)
            if precision.name == "bfloat16" and ranks.device.type == "cpu" and not cpu_has_bfloat16():
                progress.note("warning: this run began in bfloat16 and continues in it, but this CPU has no instructions for it")
        make_folder(resolved, folder, progress)
        fill_folder(out, config, make_record(data, objective, computed) | precision.record() | compilation.record() | began, data)
        if decay is not None:
            write_start(out, decay, config.train.keep_checkpoints)
    ranks.barrier()
    if contents is None:
        return Run(resolved, objective, State(), filled, start_norm, precision.name, compilation.mode)
    checkpoint.load_model_tensors(objective, contents.model, str(out))
    objective.load_carry_state(contents.carry)
    if decay is None:
        progress.note(f"resuming {out} at step {contents.step}")
    else:
        steps = config.train.max_steps - decay.step
        progress.note(f"continuing {decay.run} at step {decay.step:,}: the learning rate decays to zero over {steps:,} steps")
    state = State.from_checkpoint(contents)
    return Run(resolved, objective, state, None, start_norm, precision.name, compilation.mode)


def is_complete(state: State, config: PretrainConfig) -> bool:
    """Whether a run has done all its steps or used all its time."""
    hours = config.train.max_hours
    return state.step >= config.train.max_steps or (hours is not None and state.seconds >= hours * 3600)


def _rows(resolved: ResolvedRun) -> BatchSource:
    """Rows to train on: those of the data set, mixed with those of the replayed one if there is one."""
    config, replay = resolved.config, resolved.replay
    own = training_stream(resolved.data, config)
    if resolved.replayed is None or replay is None:
        return own
    other = training_stream(resolved.replayed, config)
    assert isinstance(own, ExampleStream)  # other objectives are refused when the run is resolved
    assert isinstance(other, ExampleStream)
    return MixedStream(own, other, replay.share)


def training_stream(data: TokenData, config: PretrainConfig) -> RowStream:
    """Rows to train on: shuffled, or in order within each slot of the batch if the objective has a memory."""
    stretches = step_sizes(config.train, config.data).row_stretches
    in_slots = config.objective.reads_in_order
    split, seed = data.split("train"), config.train.seed
    return scheduled_rows(split, data.special_tokens, config.data, seed, stretches, in_slots=in_slots)


def epochs_of(rows: RowStream, examples: int) -> float:
    """Number of times that the first `examples` rows read the text."""
    return rows.epochs(examples) if isinstance(rows, SuccessiveRows) else examples / rows.num_rows


def heldout_stream(data: TokenData, config: PretrainConfig) -> RowStream | None:
    """Held-out rows in their own order; None if the data set has no held-out split."""
    split = data.split("heldout")
    if split.num_tokens == 0:
        return None
    return heldout_rows(split, data.special_tokens, config.data)


def notes_on_rows(data: TokenData, config: PretrainConfig) -> list[str]:
    """Notes about the rows, for the user to read before training."""
    rows = training_stream(data, config)
    if isinstance(rows, SuccessiveRows):
        rows = rows.streams[0]  # of the shortest rows, in which sentences end least often
    if not isinstance(rows, TwoPartStream) or not config.objective.predicts_next_sentence:
        return []
    share = rows.follows_share()
    if share > _LEAST_FOLLOWING:
        return []
    return [
        f"next-sentence prediction: segment B follows segment A in about {share:.0%} of the rows instead of half. A must end "
        f"with a sentence, and in most rows no sentence ends early enough, so the answer 'no' is nearly always right. Prepare "
        f"the text with one sentence per line, or set a longer data.sequence_length, or objective.next_sentence_weight=0"
    ]


def check_shares(config: PretrainConfig, ranks: Ranks) -> None:
    """Check that the sequences of a step can be divided evenly among the ranks.

    Raises:
        ConfigError: they cannot be divided evenly.
    """
    for stretch in step_sizes(config.train, config.data).stretches:
        if stretch.rows % ranks.world_size:
            what = f"train.sequences_per_step {stretch.rows}"
            if config.train.batch_schedule or config.data.length_schedule:
                tokens = stretch.rows * stretch.length
                what = f"the {stretch.rows} rows of {stretch.length} in an update of {tokens:,} tokens"
            raise ConfigError(
                f"{what} cannot be divided evenly among {ranks.world_size} processes",
                hint=f"set a number of rows that is a multiple of {ranks.world_size}",
            )


def precision_of(resolved: ResolvedRun, ranks: Ranks, same_precision_as: Mapping[str, Any] | None = None) -> Precision:
    """Precision of the run: the one it started with, that of another run, or the faster one on this machine."""
    config, known = resolved.config, same_precision_as
    if resolved.resume != "never" and is_run(resolved.out):
        record: Mapping[str, Any] = read_record(resolved.out)
    else:
        record = {} if resolved.decay is None else resolved.decay.record
    if record:
        known = {**record.get("arithmetic", {}), **{key: record[key] for key in ("precision_milliseconds",) if key in record}}
    rows = config.train.micro_batch_size or config.train.sequences_per_step // ranks.world_size
    return shared_precision(config.train.precision, ranks, shape_of(config.model, rows * config.data.sequence_length), known)


def workload_of(config: PretrainConfig, ranks: Ranks, precision: str) -> Workload:
    """What the networks of a run compute in one forward pass."""
    train = config.train
    rows = train.micro_batch_size or train.sequences_per_step // ranks.world_size
    steps = None if train.max_hours is not None else train.max_steps
    divided = train.parallel != "ddp" and ranks.world_size > 1
    return Workload(config.model, rows, config.data.sequence_length, precision, steps, divided)


def _notes(resolved: ResolvedRun) -> list[str]:
    """Settings that have no effect, and notes about the rows."""
    objective, optimizer = resolved.config.objective, resolved.config.optimizer
    return [
        *(f"{each.key} = {each.value} of the {each.origin} does not apply: {each.reason}" for each in resolved.settings.dropped),
        *(
            f"objective.{name} = {getattr(objective, name)} has no effect: it needs objective.{needed}"
            for name, needed in objective.without_effect().items()
        ),
        *(
            f"optimizer.{name} = {getattr(optimizer, name)} has no effect: it needs optimizer.schedule {needed}"
            for name, needed in unused_by_schedule(optimizer).items()
        ),
        *notes_on_rows(resolved.data, resolved.config),
    ]


def _fresh_parts(filled: Filled) -> str:
    """The parts without weights from the model, in words."""
    fresh = f"; fresh: {', '.join(filled.fresh)}" if filled.fresh else ""
    return fresh + (f"; {filled.added_tokens:,} added tokens" if filled.added_tokens else "")


def _note_changed_arithmetic(before: Mapping[str, Any], now: Mapping[str, Any], progress: Progress) -> None:
    """Warn if the arithmetic has changed: a run is bit-identical only if it is computed in the same way throughout."""
    changed = [f"{key} {before[key]} -> {value}" for key, value in now.items() if before.get(key, value) != value]
    if changed:
        progress.note(f"the arithmetic of this run has changed ({', '.join(changed)}): training continues, but not bit for bit")


def _last_phase(objective: Objective, config: PretrainConfig) -> tuple[str, int] | None:
    """Name of the last of several phases, and the number of steps before it, if a time budget may end the run earlier."""
    phases = objective.phases(config.train.max_steps)
    if config.train.max_hours is None or len(phases) == 1:
        return None
    return phases[-1].name, config.train.max_steps - phases[-1].steps


def _time_budget(resolved: ResolvedRun, seconds: float) -> TimeBudget | None:
    """Work that the clock schedules under a time budget, because the user has not set its interval."""
    hours = resolved.config.train.max_hours
    if hours is None:
        return None
    kinds: tuple[Work, ...] = ("log", "evaluate", "checkpoint")
    free = [kind for kind in kinds if f"train.{kind}_every_steps" not in resolved.settings.user_set]
    return TimeBudget(hours * 3600, free, seconds)


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
