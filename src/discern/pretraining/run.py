"""Pre-training. Read this module first: it plans a run, checks the plan, builds or restores the run, and calls the loop.

From here, four files lead to the losses of the generator and the discriminator: training/loop.py, objectives/masked.py,
objectives/rtd.py and objectives/losses.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from discern import __version__
from discern.config.resolve import InvalidConfigError, Problem, Resolved
from discern.config.schema import flatten, to_toml
from discern.data.batching.mixture import HeldoutMixture, MixedData, MixedStream, open_data, sources_of, weighted
from discern.data.batching.rows import heldout_rows, scheduled_rows
from discern.data.batching.stream import RowStream
from discern.data.dataset.manifest import TOKENIZER_NAME
from discern.data.dataset.shards import TokenData
from discern.diagnosis.health import (
    HealthMonitor,
    diagnosable_from,
    diagnose_duplicates,
    embedding_norm,
    expectations,
    unusual_findings,
    warning_of,
)
from discern.errors import CheckpointError, ConfigError, DataError, counted
from discern.model_files.folder import PROVENANCE, ModelFolder, open_model
from discern.model_files.run import (
    CHECKPOINTS,
    CONFIG_FILE,
    COUNTS_FILE,
    RECORD_FILE,
    TOKENIZER_FILE,
    arithmetic,
    build_objective,
    check_words,
    counts_text,
    is_run,
    make_record,
    read_record,
    vocabulary_of,
)
from discern.models.attention import span_obstacle
from discern.objectives.base import Objective
from discern.pretraining.resume import (
    NEW_RUN,
    RECORD_KEY,
    DecayStart,
    Resume,
    attach_teacher,
    check_parameters,
    decay_settings,
    had_results,
    has_progress,
    open_start,
    refuse_another_run,
    risen_rate,
    run_of,
    write_start,
)
from discern.pretraining.warm_start import WarmStartResult, added_pieces, fill, start_config, start_generator
from discern.progress import BudgetProgress, Progress, Silent, duration_in_words, warning_to
from discern.storage.checksums import CHECKSUMS_NAME, write_recorded
from discern.storage.files import OutputFolder, cannot_write, check_apart
from discern.training import checkpoint
from discern.training.config import NO_STEP_LIMIT, PretrainConfig, load_pretrain_config, read_written_config, step_sizes
from discern.training.distributed import Ranks, check_consistency, check_ranks, join_ranks
from discern.training.execution import Compilation, Precision, choose_compilation, shared_precision
from discern.training.flops import run_flops
from discern.training.loop import train
from discern.training.metrics import MetricsLog, TimeBudget, Work, check_trackers, read_metrics
from discern.training.process import StopRequest, leave_if_stopped, lock_patience, stop_on_signals
from discern.training.state import State, TrainContext, average_warning

DataSets: TypeAlias = Path | str | Sequence[Path | str] | Mapping[Path | str, float] | Mapping[str, float]
"""The data set of a run, or the sources of its mixture, possibly with weights: folders, or addresses of data sets elsewhere."""


def pretrain(
    *,
    out: Path,
    device: str = "auto",
    same_precision_as: Mapping[str, Any] | None = None,
    progress: Progress,
    **options: Any,
) -> dict[str, Any] | None:
    """Train a run to its end. Return the last record of its metrics, or None on ranks that don't write.

    Args:
        out: folder of the run.
        same_precision_as: record of the arithmetic of another run, whose precision is used if train.precision is 'auto'.
        options: further options of `plan`: data, config, preset, overrides, resume, init_from, decay_from.

    Raises:
        ConfigError, DataError: the options are not compatible; nothing has been written.
        CheckpointError, NumericsError: the run had to stop; its last intact checkpoint is kept.
        KeyboardInterrupt, SystemExit(143): the run was asked to stop, and has been saved.
    """
    planned = plan(out=out, warn=progress.note, **options)
    with join_ranks(device) as ranks, stop_on_signals() as stop, OutputFolder(out) as folder:
        run = open_run(planned, ranks, folder, progress, same_precision_as)
        record = finish_run(run, ranks, stop, progress)
    leave_if_stopped(stop, run.state.step, progress, complete=not run.state.interrupted)
    return record if ranks.writes else None


# Plan: read the files that the options name.


@dataclass(frozen=True)
class Plan:
    """A pre-training run before anything is written.

    Attributes:
        out: folder of the run.
        settings: configuration of the run, with the origin of every value.
        data: data set to train on, or a `MixedData`.
        start: model whose weights the run starts from; None: it starts from random weights.
        decay: checkpoint of a run that this one continues; None also if it has checkpoints of its own already.
    """

    out: Path
    resume: Resume
    settings: Resolved[PretrainConfig]
    data: TokenData
    start: ModelFolder | None = None
    decay: DecayStart | None = None

    @property
    def config(self) -> PretrainConfig:
        """Configuration of the run."""
        return self.settings.config

    @property
    def has_progress(self) -> bool:
        """Whether the folder holds a run to be resumed. One that ended before its first checkpoint has nothing to resume."""
        return has_progress(self.out, self.resume)

    @property
    def user_set(self) -> frozenset[str]:
        """Settings that the user has set. The configuration of a run repeats every setting, whether the user set it or not."""
        return self.settings.user_set - self.settings.repeated

    @property
    def earlier_record(self) -> Mapping[str, Any]:
        """run.json of the run in the folder if it is resumed, or of the one that this run branches off; empty for a new run."""
        if self.has_progress:
            return read_record(self.out)
        return {} if self.decay is None else self.decay.record

    def start_record(self) -> dict[str, Any]:
        """Entries of run.json about the model or run that the run starts from."""
        entries: dict[str, Any] = {} if self.decay is None else self.decay.entry()
        if (start := self.start) is not None:
            model, weights = str(start.folder.resolve()), start.weights_fingerprint
            entries["start"] = {"model": model, "description": start.description, "weights": weights}
        return entries


def plan(
    *,
    data: DataSets,
    out: Path,
    config: Path | None = None,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    resume: Resume = "auto",
    init_from: Path | None = None,
    decay_from: Path | None = None,
    warn: Callable[[str], None],
) -> Plan:
    """Resolve the settings of a run and open the files that its options name. Nothing is written.

    Args:
        data: data set, or several to mix by the weights of `data.mixture`, or by their sizes.
        config: TOML file of settings, or the folder of a run.
        overrides: settings that override preset and file, as "section.key=value".
        init_from: folder of a model whose weights the run starts from; no preset is needed then.
        decay_from: a run, or a folder of its checkpoints, to continue with a decay of the learning rate.
        warn: called for each damaged checkpoint that was skipped.

    Raises:
        ConfigError, DataError, CheckpointError: the options are not compatible, or a file is missing or damaged.
    """
    source, step = (None, None) if decay_from is None else run_of(decay_from)
    locations = [data] if isinstance(data, str | Path) else [*data]
    if isinstance(data, Mapping):
        overrides = [f"data.mixture=[[0, {[*data.values()]}]]", *overrides]
    check_apart(out, *map(Path, locations), init_from, source)
    opened = open_data(locations)

    # A decay continues another run; once it has a checkpoint of its own, it is resumed as any run
    decay = start = None
    earlier = read_written_config(out / CONFIG_FILE) if has_progress(out, resume) else None
    if decay_from is not None and source is not None:
        for name, value in {"a configuration file": config, "--preset": preset, "--init-from": init_from}.items():
            if value is not None:
                raise ConfigError(
                    f"--decay-from takes settings and weights from {decay_from}, so {name} is not allowed",
                    hint=f"leave out {name}",
                )
        if earlier is None:
            decay = open_start(decay_from, opened, warn)
            settings = decay_settings(decay.config, decay.run, decay.step, overrides)
        else:
            began: dict[str, Any] | None = read_record(out).get(RECORD_KEY)
            if began is None or Path(began["run"]) != source.resolve() or step not in (None, began["step"]):
                what = (
                    "is not a decay of another run" if began is None else f"continues {began['run']} from step {began['step']:,}"
                )
                raise ConfigError(f"{out} holds a run that {what}, not the one given to --decay-from", hint=NEW_RUN)
            settings = decay_settings(earlier, out, began["step"], overrides)

    # Any other run starts from random weights, or from a model
    elif init_from is None:
        settings = load_pretrain_config(config, preset, overrides, earlier=earlier)
    else:
        start = open_model(init_from, warn=warn)
        added_pieces(start, opened)
        settings = start_config(start, vocabulary_of(opened), preset, config, overrides, earlier)
    resolved = settings.config
    opened = weighted(opened, resolved.data, in_slots=resolved.objective.reads_in_order)
    return Plan(out, resume, settings, opened, start, decay)


def training_stream(data: TokenData, config: PretrainConfig) -> MixedStream:
    """Rows to train on: shuffled, or in order within each slot of the batch if the objective has a memory."""
    segments, splits = step_sizes(config.train, config.data).segments, [each.split("train") for each in sources_of(data).values()]
    in_slots, seed = config.objective.reads_in_order, config.train.seed
    return scheduled_rows(splits, data.special_tokens, config.data, seed, segments, in_slots=in_slots)


def heldout_stream(data: TokenData, config: PretrainConfig) -> RowStream | None:
    """Held-out rows in their own order; None if no data set has a held-out split."""
    splits = {name: source.split("heldout") for name, source in sources_of(data).items()}
    rows = {name: heldout_rows(split, data.special_tokens, config.data) for name, split in splits.items() if split.num_tokens}
    if isinstance(data, MixedData) and rows:
        return HeldoutMixture(rows, data.weights)
    return next(iter(rows.values()), None)


# Check: everything that can be known before the folder is changed.


def check(plan: Plan, ranks: Ranks) -> None:
    """Check a plan on these ranks, and report all problems together. Nothing is written.

    Raises:
        ConfigError, DataError, CheckpointError: the options are not compatible with each other, the machine or the folder.
    """
    config, data, train, began = plan.config, plan.data, plan.config.train, plan.start_record()
    same_on_all_ranks = {
        "data set": data.fingerprint,
        "version": __version__,
        "model to start from": began.get("start", {}).get("weights", "none"),
    }
    checks: tuple[Callable[[], object], ...] = (
        lambda: check_trackers(train.tracker, tensorboard=train.tensorboard),
        lambda: check_shares(config, ranks),
        lambda: check_ranks(ranks, plan.out, config, **same_on_all_ranks),
        lambda: check_words(config, data),
        lambda: check_parameters(config, vocabulary_of(data), ranks.device, ranks.world_size),
        lambda: refuse_another_run(plan.out, data, config, began) if plan.has_progress else _refuse_other_files(plan),
    )
    problems: dict[str, ConfigError | DataError | CheckpointError] = {}
    for run_check in checks:
        try:
            run_check()
        except (ConfigError, DataError, CheckpointError) as problem:
            problems[problem.message] = problem
    if len(problems) == 1:
        raise next(iter(problems.values()))
    if problems:
        raise InvalidConfigError([Problem("", problem.message, problem.hint) for problem in problems.values()])


def check_shares(config: PretrainConfig, ranks: Ranks) -> None:
    """Check that the sequences of a step can be divided evenly among the ranks.

    Raises:
        ConfigError: they cannot be divided evenly.
    """
    for size in step_sizes(config.train, config.data).segments:
        if size.rows % ranks.world_size:
            raise ConfigError(
                f"an update of {size.rows} rows of {size.length} (train.sequences_per_step, or a schedule) cannot be divided "
                f"evenly among {ranks.world_size} processes",
                hint=f"set a number of rows that is a multiple of {ranks.world_size}",
            )


def _refuse_other_files(plan: Plan) -> None:
    """Check that the folder holds nothing but a run, or the remains of one that was killed while it started."""
    if plan.resume == "must":
        raise CheckpointError(f"{plan.out} has no checkpoint to resume from", hint="leave out --resume to start a new run")
    if not is_run(plan.out):
        written_first = {CONFIG_FILE, RECORD_FILE, TOKENIZER_FILE, COUNTS_FILE, CHECKSUMS_NAME}
        OutputFolder(plan.out).refuse_others(written_first, "run")


# Open: build the networks, start or restore them, and claim the folder.


@dataclass(frozen=True)
class Run:
    """A run whose networks have their weights and whose folder is locked.

    Attributes:
        warm_start: how the weights of a model were used; None if the run was resumed or started from random weights.
        start_norm: mean norm of the initial word embeddings; None if unknown.
    """

    plan: Plan
    objective: Objective
    state: State
    warm_start: WarmStartResult | None
    start_norm: float | None
    precision: Precision
    compilation: Compilation


def open_run(
    plan: Plan, ranks: Ranks, folder: OutputFolder, progress: Progress, same_precision_as: Mapping[str, Any] | None = None
) -> Run:
    """Check the plan, build the networks with their weights on the device, and claim the folder for the run.

    Raises:
        ConfigError, DataError: the options are not compatible, or another process is using the folder; nothing was written.
        CheckpointError: the folder's checkpoints are damaged.
    """
    config, out = plan.config, plan.out
    # Locked before its checkpoints are read: another process could otherwise write a newer one in between.
    ranks.run_on_rank_zero(lambda: folder.acquire(lock_patience()))
    check(plan, ranks)
    resumes, record = plan.has_progress, plan.earlier_record
    decay = None if resumes else plan.decay

    # Build the networks with the weights of the seed
    objective = build_objective(config, vocabulary_of(plan.data))
    objective.initialize(config.train.seed)

    attach_teacher(objective, config, ranks.device, plan.data.tokenizer_fingerprint)

    # Start from models, or restore the newest intact checkpoint
    contents = None if decay is None else decay.contents
    if resumes:
        contents = checkpoint.load_newest(out / CHECKPOINTS, progress.note)
    # A rank that does not see the newest checkpoint would continue from an earlier one.
    newest = "none" if contents is None else f"step {contents.step:,}"
    hint = "start all processes again: a network file system may show new files some seconds late"
    check_consistency(ranks, {"newest checkpoint": newest}, hint=hint, error=DataError)
    warm_start = None
    if contents is None:
        if plan.start is not None:
            warm_start = fill(objective, plan.start, added_pieces(plan.start, plan.data))
        if (source := config.objective.generator_source) is not None:
            start_generator(objective, Path(source), plan.data.tokenizer_fingerprint, progress.note)
    began = plan.start_record()
    if resumes and RECORD_KEY in record:
        began[RECORD_KEY] = record[RECORD_KEY]
    # Random weights can be recomputed from the seed; those of another model are not stored.
    foreign = plan.start is not None or config.objective.generator_source is not None or "start" in began.get(RECORD_KEY, {})
    start_norm = embedding_norm(objective) if contents is None or not foreign else None
    state = State()
    if contents is not None:
        checkpoint.load_model_tensors(objective, contents.model, str(out))
        objective.load_carry_state(contents.carry)
        state = State.from_checkpoint(contents)
    ranks.barrier()  # all ranks have read the folder

    # Choose precision and compilation
    precision = precision_of(plan, ranks, same_precision_as)
    steps = config.train.max_steps if config.train.max_hours is None else None
    compilation = choose_compilation(config.train.compile, ranks.device, steps)
    run = Run(plan, objective, state, warm_start, start_norm, precision, compilation)

    # Claim the folder
    if ranks.writes:
        computed = arithmetic(ranks.device, precision.name, objective, ranks.world_size)
        computed |= {"compile": compilation.enabled} if config.train.compile else {}
        for line in _notes(run, ranks, record.get("arithmetic", computed), computed):
            progress.note(line)
        if is_run(out) and not resumes and (plan.resume == "never" or had_results(out)):
            progress.note(f"moved the earlier run to {folder.move_aside()}")
        folder.make()
        if contents is None or contents.step <= config.train.max_steps:  # else it is complete, and keeps its own configuration
            earlier = [record.get(PROVENANCE, {}), {} if plan.start is None else plan.start.provenance]
            entries = make_record(plan.data, objective, computed, earlier) | precision.record() | began
            fill_folder(out, config, entries, plan.data)
        if decay is not None:
            write_start(out, decay, config.train.keep_checkpoints)
    ranks.barrier()
    objective.to(ranks.device)
    return run


def precision_of(plan: Plan, ranks: Ranks, same_precision_as: Mapping[str, Any] | None = None) -> Precision:
    """Precision of the run: the one it started with, that of another run, or the faster one on this machine."""
    config, record = plan.config, plan.earlier_record
    if record:
        measured = record.get("precision_milliseconds")
        same_precision_as = {**record.get("arithmetic", {}), "precision_milliseconds": measured}
    rows = config.train.micro_batch_size or config.train.sequences_per_step // ranks.world_size
    tokens = rows * config.data.sequence_length
    return shared_precision(config.train.precision, ranks, config.model, tokens, same_precision_as)


def fill_folder(out: Path, config: PretrainConfig, record: dict[str, Any], data: TokenData) -> None:
    """Write the files that describe the run.

    Raises:
        DataError: the folder cannot be written.
    """
    try:
        checkpoint.clean(out / CHECKPOINTS)
        data.tokenizer()  # the tokenizer that the ids belong to
        tokenizer = (data.folder / TOKENIZER_NAME).read_bytes()
        files = {CONFIG_FILE: to_toml(config), RECORD_FILE: json.dumps(record, indent=1) + "\n"}
        write_recorded(out, {TOKENIZER_FILE: tokenizer, COUNTS_FILE: counts_text(data), **files})
    except OSError as problem:
        raise cannot_write(out, problem) from problem


# Notes: what the user should know before training.


def _notes(run: Run, ranks: Ranks, before: Mapping[str, Any], computed: Mapping[str, Any]) -> list[str]:
    """Settings without effect, what the run starts from, and how it is computed.

    Args:
        before: the arithmetic that the run was computed with so far.
        computed: its arithmetic from now on.
    """
    plan, config, train, out = run.plan, run.plan.config, run.plan.config.train, run.plan.out
    before, computed = dict(before), dict(computed)
    notes = [f"{drop.key} = {drop.value} of the {drop.origin} does not apply: {drop.reason}" for drop in plan.settings.dropped]

    notes += plan.settings.without_effect

    # What the run starts from
    if plan.has_progress:
        earlier = read_written_config(out / CONFIG_FILE)
        if (warning := risen_rate(earlier, config, run.state.step)) is not None:
            notes.append(f"warning: {warning}")
        notes.append(f"resuming {out} at step {run.state.step}")
        for key in ("micro_batch_size", "gradient_checkpointing"):
            before[f"train.{key}"], computed[f"train.{key}"] = getattr(earlier.train, key), getattr(train, key)
    elif plan.decay is not None:
        steps = train.max_steps - plan.decay.step
        notes.append(
            f"continuing {plan.decay.run} at step {plan.decay.step:,}: the learning rate decays to zero over {steps:,} steps"
        )
    elif plan.resume == "auto" and is_run(out):
        notes.append(f"{out} holds a run without a checkpoint; it starts again")
    if (result := run.warm_start) is not None and plan.start is not None:
        fresh = f"; fresh: {', '.join(result.fresh)}" if result.fresh else ""
        added = f"; {result.added_tokens:,} added tokens" if result.added_tokens else ""
        notes.append(f"starting from {plan.start.description}{fresh}{added}")

    # How it is computed: a run is reproduced bit for bit only if it is computed in the same way throughout
    if ranks.device.type == "cuda":
        reason = span_obstacle(run.objective, ranks.device, run.precision.name)
        notes.append(
            f"attention runs in padded rows (torch's scaled_dot_product_attention), because {reason}"
            if reason
            else "attention runs among the real tokens alone, without a mask (torch's varlen_attn)"
        )
    if train.compile:
        notes.append(run.compilation.note)
    changed = [f"{key} {before[key]} -> {value}" for key, value in computed.items() if before.get(key, value) != value]
    if changed:
        notes.append(
            f"this run is now computed differently ({', '.join(changed)}): training continues, but the weights will not be bit "
            "for bit those of an uninterrupted run"
        )
    return notes


def finish_run(run: Run, ranks: Ranks, stop: StopRequest, progress: Progress) -> dict[str, Any]:
    """Train the rest of a run. Return the last record of its metrics."""
    plan, objective, state = run.plan, run.objective, run.state
    config, train_config, out = plan.config, plan.config.train, plan.out
    seconds = None if train_config.max_hours is None else train_config.max_hours * 3600

    # A run that has done all its steps, or used all its time, may still lack its last evaluation
    complete = state.step >= train_config.max_steps or (seconds is not None and state.seconds >= seconds)
    records = read_metrics(out) if complete and ranks.writes else []
    logged = any(record["step"] == state.step and "tokens" in record for record in records)
    if complete and (state.pending is None or ranks.gather(logged)[0]):
        limit = "train.max_steps" if state.step >= train_config.max_steps else "train.max_hours"
        progress.note(f"{out} is complete at step {state.step}: nothing to do; to train longer, raise {limit}")
        return records[-1] if records else {"step": state.step}
    state.finished = complete

    # Show the progress in steps, or under a time budget as the fraction of it that is used
    display: Progress = progress if ranks.writes else Silent()
    if seconds is not None and ranks.writes:
        bound = None if train_config.max_steps >= NO_STEP_LIMIT else train_config.max_steps
        display = BudgetProgress(progress, seconds, state.seconds, bound)
    display.start("pre-training", train_config.max_steps, "steps")
    display.advance(state.step)
    statistics = plan.data.manifest.statistics
    for finding in unusual_findings(diagnose_duplicates(statistics.documents, statistics.duplicates)):
        display.note(warning_of(finding))

    # Train
    metrics_log = None
    if ranks.writes:
        tensorboard, tracker = train_config.tensorboard, train_config.tracker
        metrics_log = MetricsLog(out, state.logged_step, tensorboard=tensorboard, tracker=tracker, warn=warning_to(display))
    quiet_steps = diagnosable_from(config.optimizer.warmup_steps, train_config.max_steps)
    expected, sizes = expectations(objective, train_config.max_steps, flatten(config)), step_sizes(train_config, config.data)
    context = TrainContext(
        objective=objective,
        source=training_stream(plan.data, config),
        heldout=heldout_stream(plan.data, config),
        optimizer=config.optimizer,
        train=train_config,
        ranks=ranks,
        precision=run.precision.name,
        folder=out,
        metrics_log=metrics_log,
        progress=display,
        stop=stop,
        header={"data_fingerprint": plan.data.fingerprint, "tokenizer_fingerprint": plan.data.tokenizer_fingerprint},
        health_monitor=HealthMonitor(quiet_steps, expected, run.start_norm),
        flops=run_flops(objective, train_config.max_steps, sizes),
        time_budget=TimeBudget(seconds or 0.0, clocked_work(plan) if seconds else (), state.seconds),
        sizes=sizes,
        compiled=run.compilation.enabled,
    )
    try:
        record = train(context, state)
    finally:
        display.finish()
        if metrics_log is not None:
            metrics_log.close()

    # Tell what a time budget has left out: how many steps fit into it was not known before
    if seconds is not None and ranks.writes and not state.interrupted:
        if (warning := average_warning(train_config, state.step)) is not None:
            progress.note(f"warning: {warning}")
        if state.step < train_config.max_steps and state.seconds >= seconds:
            done = f"{counted(state.step, 'step')} in {duration_in_words(state.seconds)}"
            progress.note(f"finished: {done}; to train longer, raise train.max_hours")
    return record


def clocked_work(plan: Plan) -> list[Work]:
    """Kinds of work that a time budget schedules: those whose interval the user has not set."""
    kinds: tuple[Work, ...] = ("log", "evaluate", "checkpoint")
    return [kind for kind in kinds if f"train.{kind}_every_steps" not in plan.user_set]
