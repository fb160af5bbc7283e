"""Pre-training: THE PAGE TO READ FIRST. Build the parts, run the loop."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from discern.config.tree import flatten, to_toml
from discern.data.manifest import TOKENIZER_NAME
from discern.data.shards import TokenData
from discern.data.source import RowStream, heldout_rows, training_rows
from discern.errors import CheckpointError, ConfigError, DataError
from discern.objectives.base import Objective
from discern.progress import Progress, Silent
from discern.training import checkpoint
from discern.training.diagnosis import Watchman
from discern.training.flops import run_flops
from discern.training.interrupt import StopRequest, stop_on_signals
from discern.training.journal import Journal, read_metrics
from discern.training.loop import Parts, State, train
from discern.training.parallel import Ranks, join_ranks
from discern.training.precision import resolve_precision
from discern.workflows.configuration import load_pretrain_config
from discern.workflows.generator_start import start_generator
from discern.workflows.runs import (
    CHECKPOINTS,
    CONFIG_FILE,
    COUNTS_FILE,
    RECORD_FILE,
    TOKENIZER_FILE,
    arithmetic,
    build_objective,
    check_words,
    is_run,
    make_record,
    read_record,
    vocabulary_of,
    write_counts,
)
from discern.workflows.settings import PretrainConfig

# What may change from one session of a run to the next; anything else makes it another run.
MAY_CHANGE = {
    f"train.{key}"
    for key in (
        "max_steps",
        "max_hours",
        "log_every_steps",
        "evaluate_every_steps",
        "evaluate_sequences",
        "checkpoint_every_steps",
        "keep_checkpoints",
        "tensorboard",
    )
}


@dataclass(frozen=True)
class PretrainRequest:
    """What to train, on what, into which folder.

    Attributes:
        config: TOML file, or None.
        preset: name of a preset, or None.
        overrides: "section.key=value".
        resume: 'auto' continues a run that is there, 'never' starts over (an old run is moved aside), 'must' continues only.
        device: 'auto', 'cpu', 'cuda', ...
    """

    data: Path
    out: Path
    config: Path | None = None
    preset: str | None = None
    overrides: Sequence[str] = ()
    resume: Literal["auto", "never", "must"] = "auto"
    device: str = "auto"


def pretrain(request: PretrainRequest, progress: Progress) -> dict[str, Any] | None:
    """Run to the end; gives the last record of the journal, or None on ranks that don't write.

    Raises:
        ConfigError, DataError: something doesn't fit; nothing has been written.
        CheckpointError, NumericsError: the run had to stop; its last good checkpoint is in place.
        KeyboardInterrupt, SystemExit(143): it was asked to stop, and has saved.
    """
    resolved = load_pretrain_config(request.config, request.preset, request.overrides)
    config = resolved.config
    data = TokenData.open(request.data)
    with join_ranks(request.device) as ranks, stop_on_signals() as stop:
        check_shares(config, ranks)
        for dropped in resolved.dropped if ranks.writes else ():
            progress.note(f"{dropped.key} = {dropped.value} of the {dropped.origin} does not apply: {dropped.reason}")
        check_words(config, data)
        objective = build_objective(config, vocabulary_of(data))
        objective.phases(config.train.max_steps)  # refuses what the steps don't suffice for, before anything is written
        state = _start_or_resume(request, config, data, objective, progress, ranks)
        objective.to(ranks.device)
        if is_complete(state, config):
            progress.note(
                f"{request.out} is complete at step {state.step}: nothing to do; a larger train.max_steps or max_hours goes on"
            )
            return (read_metrics(request.out) or [{"step": state.step}])[-1] if ranks.writes else None
        record = _train(request.out, config, data, objective, state, (ranks, progress, stop))
    leave_if_stopped(stop, state, progress)
    return record if ranks.writes else None


def _train(
    out: Path,
    config: PretrainConfig,
    data: TokenData,
    objective: Objective,
    state: State,
    surroundings: tuple[Ranks, Progress, StopRequest],
) -> dict[str, Any]:
    ranks, progress, stop = surroundings
    journal = Journal(out, state.step, tensorboard=config.train.tensorboard) if ranks.writes else None
    listener = progress if ranks.writes else Silent()
    listener.start("pre-training", config.train.max_steps, "steps")
    listener.advance(state.step)
    try:
        return train(
            Parts(
                objective=objective,
                source=training_stream(data, config),
                heldout=heldout_stream(data, config),
                optimizer=config.optimizer,
                train=config.train,
                ranks=ranks,
                precision=resolve_precision(config.train.precision, ranks.device),
                folder=out,
                journal=journal,
                progress=listener,
                stop=stop,
                header={"data_fingerprint": data.fingerprint, "tokenizer_fingerprint": data.tokenizer_fingerprint},
                watchman=Watchman(config.optimizer.warmup_steps, generator_learns="generator" in objective.networks()),
                flops=run_flops(objective, config.train.max_steps, config.data.sequence_length, config.train.sequences_per_step),
            ),
            state,
        )
    finally:
        listener.finish()
        if journal is not None:
            journal.close()


def is_complete(state: State, config: PretrainConfig) -> bool:
    """Whether a run has had its steps or its time."""
    hours = config.train.max_hours
    return state.step >= config.train.max_steps or (hours is not None and state.seconds >= hours * 3600)


def training_stream(data: TokenData, config: PretrainConfig) -> RowStream:
    """The rows to train on, shuffled, or slot by slot where the objective remembers."""
    slots = config.train.sequences_per_step if config.objective.reads_in_order else None
    return training_rows(data.split("train"), data.special_tokens, config.data, config.train.seed, slots=slots)


def heldout_stream(data: TokenData, config: PretrainConfig) -> RowStream | None:
    """Held-out rows in their own order, or None where the data set holds nothing out."""
    split = data.split("heldout")
    if split.num_tokens == 0:
        return None
    return heldout_rows(split, data.special_tokens, config.data)


def _start_or_resume(
    request: PretrainRequest, config: PretrainConfig, data: TokenData, objective: Objective, progress: Progress, ranks: Ranks
) -> State:
    """Fill the networks, from the seed or from the newest checkpoint, and make sure that the folder is this run's."""
    out = request.out
    contents = None
    if request.resume != "never" and is_run(out):
        _refuse_another_run(out, config, data)
        contents = checkpoint.load_newest(out / CHECKPOINTS, progress.note)
    elif not is_run(out) and not _may_hold_run(out):
        raise DataError(f"{out} is not empty and holds no run", hint="choose another --out, or empty the folder")
    if request.resume == "must" and contents is None:
        raise CheckpointError(f"{out} holds no checkpoint to resume from", hint="leave --resume out to start a new run")
    objective.initialise(config.train.seed)
    begin = getattr(config.objective, "generator_checkpoint", None)
    if begin is not None and contents is None:
        start_generator(objective, Path(begin), data.tokenizer_fingerprint, progress.note)
    ranks.barrier()
    if ranks.writes:
        computed = arithmetic(ranks.device, resolve_precision(config.train.precision, ranks.device))
        if contents is not None:
            _note_other_arithmetic(read_record(out).get("arithmetic", computed), computed, progress)
        _prepare_folder(request, config, make_record(data, objective, computed), data, progress)
    ranks.barrier()
    if contents is None:
        return State()
    checkpoint.load_model_tensors(objective, contents.model, str(out))
    objective.load_carry_state(contents.carry)
    progress.note(f"resuming {out} at step {contents.step}")
    kept = {key: contents.state[key] for key in ("step", "tokens", "seconds", "updates")}
    return State(**kept, optimizer=dict(contents.optimizer))


def _note_other_arithmetic(before: dict[str, Any], now: dict[str, Any], progress: Progress) -> None:
    """A run goes on exactly only where it is computed as it was."""
    changed = [f"{key} {before[key]} -> {value}" for key, value in now.items() if before.get(key, value) != value]
    if changed:
        progress.note(f"this run was computed otherwise before ({', '.join(changed)}): it goes on, but not to the last bit")


def _prepare_folder(
    request: PretrainRequest, config: PretrainConfig, record: dict[str, Any], data: TokenData, progress: Progress
) -> None:
    """The files that say what the run is; an earlier run is moved aside if it is to be started over."""
    out = request.out.resolve()
    try:
        if request.resume == "never" and is_run(out):
            aside = next(path for number in itertools.count(1) if not (path := out.with_name(f"{out.name}.{number}")).exists())
            out.rename(aside)
            progress.note(f"moved the earlier run to {aside}")
        out.mkdir(parents=True, exist_ok=True)
        checkpoint.clean(out / CHECKPOINTS)
        checkpoint.write_text(out / TOKENIZER_FILE, (data.folder / TOKENIZER_NAME).read_text(encoding="utf-8"))
        write_counts(out, data)
        checkpoint.write_text(out / CONFIG_FILE, to_toml(config))
        checkpoint.write_text(out / RECORD_FILE, json.dumps(record, indent=1) + "\n")
    except OSError as problem:
        raise DataError(f"cannot write to {out}: {problem}", hint="choose another --out, or free some space") from problem


def _may_hold_run(out: Path) -> bool:
    """Whether a folder is free for a run: absent, empty, or left by one that was killed while it began."""
    if not out.exists():
        return True
    own = {CONFIG_FILE, RECORD_FILE, TOKENIZER_FILE, COUNTS_FILE}
    return out.is_dir() and {path.name.removeprefix(".").removesuffix(".partial") for path in out.iterdir()} <= own


def _refuse_another_run(out: Path, config: PretrainConfig, data: TokenData) -> None:
    """Raise where the folder's run differs in anything that decides what it computes."""
    record = read_record(out)
    hint = "choose another --out for a new run, or --resume never to start over here (the old run is moved aside)"
    if record["data_fingerprint"] != data.fingerprint:
        raise DataError(f"{out} was trained on another data set ({record['data']}) than {data.folder}", hint=hint)
    old, new = flatten(load_pretrain_config(out / CONFIG_FILE, None, []).config), flatten(config)
    differing = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key) and key not in MAY_CHANGE)
    if differing:
        lines = [f"  {key}: {old.get(key)} there, {new.get(key)} now" for key in differing]
        raise ConfigError("\n".join([f"{out} holds a run of another configuration:", *lines]), hint=hint)


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
