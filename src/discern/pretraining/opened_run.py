"""Opening a run: its networks get their weights, and its folder the files that describe it."""

from __future__ import annotations

from collections.abc import Mapping
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
from discern.diagnosis.health import embedding_norm
from discern.errors import CheckpointError
from discern.models.unpadding import attention_path
from discern.objectives.base import Objective
from discern.pretraining.decay import RECORD_KEY, DecayStart, risen_rate, write_start
from discern.pretraining.resolved_run import (
    ResolvedRun,
    fill_folder,
    has_progress,
    make_folder,
    refuse_another_run,
    refuse_other_files,
    start_record,
)
from discern.pretraining.rows import check_shares, notes_on_rows
from discern.pretraining.warm_start import WarmStartResult, added_pieces, fill, start_generator
from discern.progress import Progress
from discern.storage.output import OutputFolder
from discern.training import checkpoint
from discern.training.compilation import Mode, Workload, shared_compilation
from discern.training.distributed import Ranks, check_ranks, check_same_start
from discern.training.precision import Precision, check_weight_precision, shape_of, shared_precision
from discern.training.pretrain_config import PretrainConfig, read_written_config
from discern.training.rank_environment import lock_patience
from discern.training.replica import check_groups, shards_of
from discern.training.schedule import unused_by_schedule
from discern.training.state import State
from discern.training.trackers import check_tensorboard, check_tracker

_NOT_BIT_FOR_BIT = "training continues, but the weights will not be bit for bit those of an uninterrupted run"


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
    filled: WarmStartResult | None
    start_norm: float | None
    precision: str
    compilation: Mode


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
    if config.train.tensorboard:
        check_tensorboard()
    check_weight_precision(config.train, ranks)
    check_shares(config, ranks)
    check_groups(config.train, ranks)
    own = {"data_set": data.fingerprint, "tokenizer": data.tokenizer_fingerprint, "version": __version__}
    check_ranks(ranks, resolved.out, config, **own, **(_origins(resolved) if ranks.world_size > 1 else {}))
    check_words(config, data)
    if ranks.writes:
        for line in _notes(resolved):
            progress.note(line)
    check_parameters(config, vocabulary_of(data), ranks.device, shards_of(config.train, ranks))
    objective = build_objective(config, vocabulary_of(data))
    last = last_phase(objective, config)  # refuses a run that is too short, before anything is written
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


def _notes(resolved: ResolvedRun) -> list[str]:
    """Settings that have no effect, and notes about the rows."""
    objective, optimizer = resolved.config.objective, resolved.config.optimizer
    # The configuration of a run repeats every setting, whether the user set it or not.
    asked = resolved.settings.user_set - resolved.settings.repeated
    return [
        *(f"{each.key} = {each.value} of the {each.origin} does not apply: {each.reason}" for each in resolved.settings.dropped),
        *(
            f"objective.{name} = {getattr(objective, name)} has no effect: it needs objective.{needed}"
            for name, needed in objective.without_effect().items()
        ),
        *(
            f"data.{name} = {getattr(resolved.config.data, name)} has no effect: it needs data.{needed}"
            for name, needed in resolved.config.data.without_effect().items()
            if f"data.{name}" in asked
        ),
        *(
            f"optimizer.{name} = {getattr(optimizer, name)} has no effect: it needs optimizer.{needed}"
            for name, needed in unused_by_schedule(optimizer, asked).items()
        ),
        *notes_on_rows(resolved.data, resolved.config),
    ]


@dataclass(frozen=True)
class ResumePoint:
    """What the run continues.

    Attributes:
        contents: the checkpoint to continue from; None for a new run.
        record: run.json of the run in the folder, or of the one it branches off; empty for a new run.
        decay: where the run branches off another one; None if it does not, or if it has a checkpoint of its own.
    """

    contents: checkpoint.Contents | None
    record: Mapping[str, Any]
    decay: DecayStart | None


def _start_or_resume(
    resolved: ResolvedRun,
    objective: Objective,
    ranks: Ranks,
    folder: OutputFolder,
    progress: Progress,
    same_precision_as: Mapping[str, Any] | None,
) -> Run:
    """Give the networks their weights, from the seed, a model or the newest checkpoint, and claim the folder for the run."""
    config, data, out = resolved.config, resolved.data, resolved.out
    earlier = _read_earlier(resolved, folder, progress)
    check_same_start(ranks, None if earlier.contents is None else earlier.contents.step)
    contents, decay = earlier.contents, earlier.decay
    objective.initialize(config.train.seed)
    filled = fill_from_models(resolved, objective, progress) if contents is None else None
    if filled is not None and resolved.start is not None:
        progress.note(f"starting from {resolved.start.description}{_fresh_parts(filled)}")
    # Random weights can be recomputed from the seed; those of another model are not stored.
    began = start_record(resolved)
    if RECORD_KEY in earlier.record and decay is None:
        began[RECORD_KEY] = earlier.record[RECORD_KEY]
    foreign = resolved.start is not None or config.objective.generator_source is not None or "start" in began.get(RECORD_KEY, {})
    start_norm = embedding_norm(objective) if contents is None or not foreign else None
    ranks.barrier()
    precision = precision_of(resolved, ranks, same_precision_as)
    workload = workload_of(config, ranks, precision.name)
    compilation = shared_compilation(config.train.compile, ranks, workload, earlier.record.get("arithmetic"))
    if ranks.writes:
        computed = arithmetic(ranks.device, precision.name, objective, ranks.world_size)
        path = attention_path(objective, ranks.device, precision.name)
        if path is not None:
            progress.note(path.note)
        if config.train.compile:
            computed["compile"] = compilation.mode
            progress.note(compilation.note)
        if contents is not None:
            _note_changed_arithmetic(earlier.record.get("arithmetic", computed), computed, progress)
            if decay is None:
                _note_changed_batches(read_written_config(out / CONFIG_FILE), config, progress)
        make_folder(resolved, folder, progress)
        if contents is None or contents.step <= config.train.max_steps:  # else it is complete, and keeps its own configuration
            record = make_record(data, objective, computed) | precision.record() | compilation.record() | began
            fill_folder(out, config, record, data)
        if decay is not None:
            write_start(out, decay, config.train.keep_checkpoints)
    ranks.barrier()
    state = State() if contents is None else _restore(resolved, objective, contents, decay, progress)
    return Run(resolved, objective, state, filled, start_norm, precision.name, compilation.mode)


def _read_earlier(resolved: ResolvedRun, folder: OutputFolder, progress: Progress) -> ResumePoint:
    """Read what the run continues: its own newest checkpoint, or that of the run that it branches off."""
    out, decay = resolved.out, resolved.decay
    contents: checkpoint.Contents | None = None
    record: Mapping[str, Any] = {}
    if has_progress(out, resolved.resume):
        refuse_another_run(resolved)
        contents = checkpoint.load_newest(out / CHECKPOINTS, progress.note)
        record = read_record(out)
        warning = None if contents is None else risen_rate(read_written_config(out / CONFIG_FILE), resolved.config, contents.step)
        if warning is not None:
            progress.note(f"warning: {warning}")
    else:
        refuse_other_files(folder)
        if resolved.resume == "auto" and is_run(out):
            progress.note(f"{out} holds a run without a checkpoint; it starts again")
    if resolved.resume == "must" and contents is None:
        raise CheckpointError(f"{out} has no checkpoint to resume from", hint="leave out --resume to start a new run")
    if contents is None and decay is not None:
        return ResumePoint(decay.contents, decay.record, decay)
    return ResumePoint(contents, record, None)


def fill_from_models(resolved: ResolvedRun, objective: Objective, progress: Progress) -> WarmStartResult | None:
    """Copy the weights of the models that a run starts from into an objective with the weights of its seed.

    Returns how those of `resolved.start` were used; None if the encoder starts from random weights.
    """
    filled = None
    if resolved.start is not None:
        filled = fill(objective, resolved.start, added_pieces(resolved.start, resolved.data))
    generator_from = resolved.config.objective.generator_source
    if generator_from is not None:
        start_generator(objective, Path(generator_from), resolved.data.tokenizer_fingerprint, progress.note)
    return filled


def _fresh_parts(filled: WarmStartResult) -> str:
    """The parts without weights from the model, in words."""
    fresh = f"; fresh: {', '.join(filled.fresh)}" if filled.fresh else ""
    return fresh + (f"; {filled.added_tokens:,} added tokens" if filled.added_tokens else "")


def _note_changed_arithmetic(before: Mapping[str, Any], now: Mapping[str, Any], progress: Progress) -> None:
    """Warn if the arithmetic has changed: a run is bit-identical only if it is computed in the same way throughout."""
    changed = [f"{key} {before[key]} -> {value}" for key, value in now.items() if before.get(key, value) != value]
    if changed:
        progress.note(f"this run is now computed differently ({', '.join(changed)}): {_NOT_BIT_FOR_BIT}")


def _note_changed_batches(before: PretrainConfig, now: PretrainConfig, progress: Progress) -> None:
    """Warn if steps are computed in other parts than before, whose dropout and sums differ."""
    keys = ("micro_batch_size", "gradient_checkpointing")
    pairs = {key: (getattr(before.train, key), getattr(now.train, key)) for key in keys}
    changed = [f"train.{key} {old} -> {new}" for key, (old, new) in pairs.items() if old != new]
    if changed:
        progress.note(f"{', '.join(changed)}: {_NOT_BIT_FOR_BIT}")


def _restore(
    resolved: ResolvedRun,
    objective: Objective,
    contents: checkpoint.Contents,
    decay: DecayStart | None,
    progress: Progress,
) -> State:
    """Load a checkpoint into the networks. Return the state of training."""
    checkpoint.load_model_tensors(objective, contents.model, str(resolved.out))
    objective.load_carry_state(contents.carry)
    if decay is None:
        progress.note(f"resuming {resolved.out} at step {contents.step}")
    else:
        steps = resolved.config.train.max_steps - decay.step
        progress.note(f"continuing {decay.run} at step {decay.step:,}: the learning rate decays to zero over {steps:,} steps")
    return State.from_checkpoint(contents)


def precision_of(resolved: ResolvedRun, ranks: Ranks, same_precision_as: Mapping[str, Any] | None = None) -> Precision:
    """Precision of the run: the one it started with, that of another run, or the faster one on this machine."""
    config, known = resolved.config, same_precision_as
    if has_progress(resolved.out, resolved.resume):
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
    divided = train.divides_weights(ranks.world_size)
    return Workload(config.model, rows, config.data.sequence_length, precision, steps, divided)


def last_phase(objective: Objective, config: PretrainConfig) -> tuple[str, int] | None:
    """Name of the last of several phases, and the number of steps before it, if a time budget may end the run earlier."""
    phases = objective.phases(config.train.max_steps)
    if config.train.max_hours is None or len(phases) == 1:
        return None
    return phases[-1].name, config.train.max_steps - phases[-1].steps
