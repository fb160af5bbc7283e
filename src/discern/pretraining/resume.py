"""Resuming: whether a folder holds a run to be resumed, with which settings, and whether it is the same run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from discern.artifacts.run import CHECKPOINTS, CONFIG_FILE, EVALUATION_FILE, is_run, read_record
from discern.config.schema import flatten
from discern.data.dataset.shards import TokenData
from discern.errors import CheckpointError, ConfigError, DataError
from discern.pretraining.decay import NEW_RUN, RECORD_KEY
from discern.report.evaluation import BLIMP_FILE
from discern.training import checkpoint
from discern.training.metrics_log import read_metrics
from discern.training.pretrain_config import PretrainConfig, read_written_config

Resume: TypeAlias = Literal["auto", "never", "must"]
"""'auto' continues an existing run, 'never' starts over (the old run is moved aside), 'must' only continues."""

_MAY_CHANGE = """
    max_steps max_hours log_every_steps evaluate_every_steps evaluate_sequences checkpoint_every_steps keep_checkpoints
    tensorboard tracker micro_batch_size gradient_checkpointing parallel shard_ranks
"""
MAY_CHANGE = {f"train.{key}" for key in _MAY_CHANGE.split()}
"""Settings that may change when a run is resumed; any other change makes it another run."""


def has_progress(out: Path, resume: Resume) -> bool:
    """Whether a folder holds a run with a checkpoint, to be resumed."""
    return resume != "never" and is_run(out) and bool(checkpoint.found(out / CHECKPOINTS))


def had_results(out: Path) -> bool:
    """Whether a run without a checkpoint was evaluated, or got so far that its checkpoints must have been removed."""
    log, evaluated = read_metrics(out), (out / EVALUATION_FILE).exists() or (out / BLIMP_FILE).exists()
    if evaluated or not log:
        return evaluated
    train = read_written_config(out / CONFIG_FILE).train
    began: int = (read_record(out).get(RECORD_KEY) or {}).get("step", 0)  # a decay begins with the log of the run before it
    return int(log[-1]["step"]) > began + min(train.checkpoint_every_steps, train.max_steps - 1)


def refuse_another_run(out: Path, data: TokenData, config: PretrainConfig, began: Mapping[str, Any]) -> None:
    """Raise an error if the run in a folder differs from a planned one in anything that affects its result.

    Args:
        data: data set of the planned run.
        config: its configuration.
        began: its `Plan.start_record`.

    Raises:
        ConfigError, DataError, CheckpointError: settings, data sets or first weights differ.
    """
    record = read_record(out)
    if record["data_fingerprint"] != data.fingerprint:
        if record["data"] == data.location:
            raise DataError(f"{out} was trained on an earlier version of {data.location}, which has changed since", hint=NEW_RUN)
        raise DataError(f"{out} was trained on {record['data']}, but {data.location} is a different data set", hint=NEW_RUN)

    # The weights that it started from
    before, now = record.get("start"), began.get("start")
    if (before and before["weights"]) != (now and now["weights"]):
        then = "with random weights" if before is None else f"with {before['description']}"
        wanted = "names no model" if now is None else f"starts from {now['description']}, which has different weights"
        more = f"add --init-from {before['model']}, or " if before and now is None else ""
        raise CheckpointError(f"{out} began {then}, but this command {wanted}", hint=more + NEW_RUN)

    # The text that is mixed in
    replays = [entries.get("replay") or {} for entries in (record, began)]
    if any(replays[0].get(key) != replays[1].get(key) for key in ("data_fingerprint", "share")):
        texts = [f"--replay-share {entry['share']:g} of {entry['data']}" if entry else "no --replay" for entry in replays]
        raise ConfigError(f"{out} was trained with {texts[0]}, but this command has {texts[1]}", hint=NEW_RUN)

    # The settings
    old, new = flatten(read_written_config(out / CONFIG_FILE)), flatten(config)
    differing = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key) and key not in MAY_CHANGE)
    if differing:
        lines = [f"  {key}: {old.get(key)} in that run, {new.get(key)} now" for key in differing]
        raise ConfigError("\n".join([f"{out} holds a run with a different configuration:", *lines]), hint=NEW_RUN)
