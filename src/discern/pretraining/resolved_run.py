"""A pre-training run as resolved from its options, and its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from discern.artifacts.model_folder import ModelFolder
from discern.artifacts.opening import open_model
from discern.artifacts.run import (
    CHECKPOINTS,
    CONFIG_FILE,
    COUNTS_FILE,
    EVALUATION_FILE,
    RECORD_FILE,
    TOKENIZER_FILE,
    counts_text,
    is_run,
    read_record,
    vocabulary_of,
)
from discern.config.resolve import Resolved
from discern.config.schema import NONE, flatten, to_toml, toml_value
from discern.data.batching.mixture import replay_fraction
from discern.data.dataset.manifest import TOKENIZER_NAME
from discern.data.dataset.shards import TokenData
from discern.data.tokenizer.extension import pieces_of_added
from discern.errors import CheckpointError, ConfigError, DataError
from discern.pretraining.decay import NEW_RUN, RECORD_KEY, DecayStart, decay_settings, open_start, run_of
from discern.pretraining.start_config import start_config
from discern.pretraining.warm_start import added_pieces
from discern.progress import Progress
from discern.report.evaluation import BLIMP_FILE
from discern.storage.checksums import CHECKSUMS_NAME, write_recorded
from discern.storage.files import cannot_write
from discern.storage.output import OutputFolder
from discern.training import checkpoint
from discern.training.metrics_log import read_metrics
from discern.training.pretrain_config import (
    LENGTH_OF_RUN,
    PretrainConfig,
    kept_when_resumed,
    load_pretrain_config,
    read_written_config,
)

Resume: TypeAlias = Literal["auto", "never", "must"]
"""'auto' continues an existing run, 'never' starts over (the old run is moved aside), 'must' only continues."""

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
        "tracker",
        "micro_batch_size",
        "gradient_checkpointing",
        "parallel",
        "shard_ranks",
    )
}
"""Settings that may change when a run is resumed; any other change makes it another run."""


@dataclass(frozen=True)
class Replay:
    """General text that is mixed in to prevent forgetting.

    Attributes:
        data: data set with the same tokenizer, or with the one that was extended.
        share: fraction of the examples, in [0, 1).
    """

    data: Path
    share: float


@dataclass(frozen=True)
class ResolvedRun:
    """A pre-training run before anything is written.

    Attributes:
        out: folder of the run.
        settings: configuration of the run, with the origin of every value.
        data: data set to train on.
        start: model whose weights the run starts from; None: it starts from random weights.
        replay: text to mix in.
        replayed: data set of that text.
        decay: checkpoint of a run that this one continues; None also if it has checkpoints of its own already.
    """

    out: Path
    resume: Resume
    settings: Resolved[PretrainConfig]
    data: TokenData
    start: ModelFolder | None = None
    replay: Replay | None = None
    replayed: TokenData | None = None
    decay: DecayStart | None = None

    @property
    def config(self) -> PretrainConfig:
        """Configuration of the run."""
        return self.settings.config


def resolve_run(
    *,
    data: Path,
    out: Path,
    config: Path | None = None,
    preset: str | None = None,
    overrides: Sequence[str] = (),
    resume: Resume = "auto",
    init_from: Path | None = None,
    replay: Replay | None = None,
    decay_from: Path | None = None,
    warn: Callable[[str], None],
) -> ResolvedRun:
    """Read the files that the options of a run name, and check that they are compatible. Nothing is written.

    Args:
        config: TOML file of settings, or the folder of a run.
        overrides: settings that override preset and file, as "section.key=value".
        init_from: folder of a model whose weights the run starts from; no preset is needed then.
        replay: text to mix in; only with `init_from`.
        decay_from: a run, or a folder of its checkpoints, to continue with a decay of the learning rate.
        warn: called for each damaged checkpoint that was skipped.

    Raises:
        ConfigError, DataError, CheckpointError: the options are not compatible, or a file is missing or damaged.
    """
    if decay_from is not None:
        given = {"a configuration file": config, "--preset": preset, "--init-from": init_from}
        for name, value in given.items():
            if value is not None:
                raise ConfigError(
                    f"--decay-from takes settings and weights from {decay_from}, so {name} is not allowed",
                    hint=f"leave out {name}",
                )
        return _resolve_decay(decay_from, data, out, overrides, resume, warn)
    OutputFolder(out).check(data, init_from, replay.data if replay else None)
    resumes = has_progress(out, resume)
    if init_from is None:
        settings = _resumed(out, config, preset, overrides) if resumes else load_pretrain_config(config, preset, overrides)
        return ResolvedRun(out, resume, settings, TokenData.open(data))
    opened = TokenData.open(data)
    start = open_model(init_from, warn=warn)
    added_pieces(start, opened)
    earlier = read_written_config(out / CONFIG_FILE) if resumes else None
    settings = start_config(start, vocabulary_of(opened), preset, config, overrides, earlier)
    replayed = None if replay is None else _open_replay(replay, settings.config, opened)
    return ResolvedRun(out, resume, settings, opened, start, replay, replayed)


def has_progress(out: Path, resume: Resume) -> bool:
    """Whether a folder holds a run to be resumed. One that ended before its first checkpoint has nothing to resume."""
    return resume != "never" and is_run(out) and bool(checkpoint.found(out / CHECKPOINTS))


def _resumed(out: Path, config: Path | None, preset: str | None, overrides: Sequence[str]) -> Resolved[PretrainConfig]:
    """The configuration of a run that is resumed, possibly for another length; it keeps what was fitted to its length.

    Raises:
        ConfigError: the configuration is invalid, or what is kept does not fit into the new length.
    """
    before = read_written_config(out / CONFIG_FILE)
    try:
        settings = load_pretrain_config(config, preset, overrides)
    except ConfigError:
        # A run that is resumed may end before a schedule of the user does.
        settings = load_pretrain_config(config, preset, overrides, shortens=False)
    kept = kept_when_resumed(before, settings)
    if not kept:
        return settings
    same = [f"{key}={NONE if value is None else toml_value(value)}" for key, value in kept.items()]
    try:
        return load_pretrain_config(config, preset, [*overrides, *same], shortens=False)
    except ConfigError as problem:
        lengths = [f"{key}={value:g}" for key in LENGTH_OF_RUN if (value := flatten(settings.config)[key]) is not None]
        raise ConfigError(
            f"{out} cannot be resumed with {' and '.join(lengths)}: {problem.message.removeprefix('--set: ')}",
            hint=f"to end it early, continue it in another folder: --decay-from {out} --out NEW",
        ) from problem


def _resolve_decay(
    path: Path, data: Path, out: Path, overrides: Sequence[str], resume: Resume, warn: Callable[[str], None]
) -> ResolvedRun:
    """Resolve a run that continues another one with a decay of the learning rate.

    Once it has a checkpoint of its own, it is resumed as any run, even if the other one has been trained further.
    """
    source, step = run_of(path)
    OutputFolder(out).check(data, source)
    opened = TokenData.open(data)
    if not has_progress(out, resume):
        start = open_start(path, opened, warn)
        settings = decay_settings(start.config, start.run, start.step, overrides, MAY_CHANGE)
        return ResolvedRun(out, resume, settings, opened, decay=start)
    began: dict[str, Any] | None = read_record(out).get(RECORD_KEY)
    if began is None or Path(began["run"]) != source.resolve() or step not in (None, began["step"]):
        what = "is not a decay of another run" if began is None else f"continues {began['run']} from step {began['step']:,}"
        raise ConfigError(f"{out} holds a run that {what}, not the one given to --decay-from", hint=NEW_RUN)
    return ResolvedRun(
        out, resume, decay_settings(read_written_config(out / CONFIG_FILE), out, began["step"], overrides, MAY_CHANGE), opened
    )


def _open_replay(replay: Replay, config: PretrainConfig, data: TokenData) -> TokenData:
    """The data set to mix in.

    Raises:
        ConfigError: the share is invalid, or the rows of this objective cannot be mixed.
        DataError: it has another tokenizer.
    """
    replay_fraction(replay.share)
    if config.data.packing == "two-part":
        raise ConfigError(
            f"--replay mixes whole rows, and objective '{config.objective.name}' builds each row from two parts of one text",
            hint="leave out --replay, or prepare one data set from both texts: discern prepare DOMAIN GENERAL --out DATA",
        )
    if config.data.length_schedule:
        raise ConfigError(
            "--replay mixes rows of one length, but data.length_schedule changes it during the run",
            hint="leave out --replay, or --set data.length_schedule=[]",
        )
    replayed = TokenData.open(replay.data)
    same = replayed.tokenizer_fingerprint == data.tokenizer_fingerprint
    if not same and pieces_of_added(replayed.tokenizer(), data.tokenizer()) is None:
        raise DataError(
            f"{replayed.folder} was made with a different tokenizer ({replayed.tokenizer_fingerprint[:12]}) from that of "
            f"{data.folder} ({data.tokenizer_fingerprint[:12]}): they cannot be mixed",
            hint=f"prepare it again: discern prepare TEXT --out DATA --tokenizer {data.folder / TOKENIZER_NAME}",
        )
    return replayed


def make_folder(run: ResolvedRun, folder: OutputFolder, progress: Progress) -> None:
    """Create the folder of the run and lock it. If the run is to start over, an earlier run is moved aside.

    A run without a checkpoint is moved aside only if it had results; the log of one that was killed early is written anew.

    Raises:
        DataError: another process is using the folder, or it cannot be created.
    """
    out = folder.path
    if is_run(out) and (run.resume == "never" or (not has_progress(out, run.resume) and _had_results(out))):
        progress.note(f"moved the earlier run to {folder.move_aside()}")
    folder.make()


def _had_results(out: Path) -> bool:
    """Whether a run without a checkpoint was evaluated, or got so far that its checkpoints must have been removed."""
    if (out / EVALUATION_FILE).exists() or (out / BLIMP_FILE).exists():
        return True
    logged = read_metrics(out)
    if not logged:
        return False
    train = read_written_config(out / CONFIG_FILE).train
    began: int = (read_record(out).get(RECORD_KEY) or {}).get("step", 0)  # a decay begins with the log of the run before it
    return int(logged[-1]["step"]) > began + min(train.checkpoint_every_steps, train.max_steps - 1)


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


def refuse_other_files(folder: OutputFolder) -> None:
    """Check that the folder holds nothing but a run, or the remains of one that was killed while it started.

    Raises:
        DataError: it holds something else.
    """
    if not is_run(folder.path):
        folder.refuse_others({CONFIG_FILE, RECORD_FILE, TOKENIZER_FILE, COUNTS_FILE, CHECKSUMS_NAME}, "run")


def refuse_another_run(run: ResolvedRun) -> None:
    """Raise an error if the run in the folder differs in anything that affects its result."""
    out, config, data = run.out, run.config, run.data
    record = read_record(out)
    hint = NEW_RUN
    if record["data_fingerprint"] != data.fingerprint and record["data"] == data.location:
        raise DataError(f"{out} was trained on an earlier version of {data.location}, which has changed since", hint=hint)
    if record["data_fingerprint"] != data.fingerprint:
        raise DataError(f"{out} was trained on {record['data']}, but {data.location} is a different data set", hint=hint)
    _refuse_another_start(run, record, hint)
    old, new = flatten(read_written_config(out / CONFIG_FILE)), flatten(config)
    differing = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key) and key not in MAY_CHANGE)
    if differing:
        lines = [f"  {key}: {old.get(key)} in that run, {new.get(key)} now" for key in differing]
        raise ConfigError("\n".join([f"{out} holds a run with a different configuration:", *lines]), hint=hint)


def _refuse_another_start(run: ResolvedRun, record: Mapping[str, Any], hint: str) -> None:
    """Raise an error if the run in the folder started from other weights, or mixes in other text."""
    out, now = run.out, start_record(run)
    there, here = record.get("start"), now.get("start")
    if (there and there["weights"]) != (here and here["weights"]):
        began = "with random weights" if there is None else f"with {there['description']}"
        wanted = "names no model" if here is None else f"starts from {here['description']}, which has different weights"
        more = "" if there is None or here is not None else f"add --init-from {there['model']}, or "
        raise CheckpointError(f"{out} began {began}, but this command {wanted}", hint=more + hint)
    replays = [each.get("replay") or {} for each in (record, now)]
    differing = [key for key in ("data_fingerprint", "share") if replays[0].get(key) != replays[1].get(key)]
    if differing:
        texts = [f"--replay-share {each['share']:g} of {each['data']}" if each else "no --replay" for each in replays]
        raise ConfigError(f"{out} was trained with {texts[0]}, but this command has {texts[1]}", hint=hint)


def start_record(run: ResolvedRun) -> dict[str, Any]:
    """Entries of run.json about the model or run that the run starts from and the text that is mixed in; empty without any."""
    found: dict[str, Any] = {} if run.decay is None else run.decay.entry()
    if run.start is not None:
        start = run.start
        found["start"] = {
            "model": str(start.folder.resolve()),
            "description": start.description,
            "weights": start.weights_fingerprint,
        }
    if run.replayed is not None and run.replay is not None:
        replayed, share = run.replayed, run.replay.share
        found["replay"] = {"data": replayed.location, "data_fingerprint": replayed.fingerprint, "share": share}
    return found
