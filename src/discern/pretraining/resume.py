"""Resuming: whether a folder holds a run to be resumed, with which settings, and whether it is the same run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from discern.config.resolve import Origin, Resolved, Setting, Settings, parse_overrides
from discern.config.schema import NONE, flatten
from discern.data.dataset.shards import TokenData
from discern.errors import CheckpointError, ConfigError, DataError
from discern.model_files.folder import ModelFolder, open_model
from discern.model_files.run import BLIMP_FILE, CHECKPOINTS, CONFIG_FILE, EVALUATION_FILE, build_objective, is_run, read_record
from discern.objectives.base import Objective, Vocabulary
from discern.objectives.masked import MaskedLanguageModel
from discern.storage.checksums import write_recorded
from discern.training import checkpoint
from discern.training.checkpoint import Contents
from discern.training.config import PretrainConfig, learning_rate, read_written_config, resolve_pretrain_config
from discern.training.metrics import METRICS_FILE, read_metrics

Resume: TypeAlias = Literal["auto", "never", "must"]
"""'auto' continues an existing run, 'never' starts over (the old run is moved aside), 'must' only continues."""

_MAY_CHANGE = """
    max_steps max_hours log_every_steps evaluate_every_steps evaluate_sequences checkpoint_every_steps keep_checkpoints
    price_per_hour tensorboard tracker micro_batch_size gradient_checkpointing parallel
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


def _check_data_set(run: Path, record: Mapping[str, Any], data: TokenData, hint: str) -> None:
    """Check that a data set is the one that a run was trained on."""
    if record["data_fingerprint"] != data.fingerprint:
        before, now = ", ".join(record["data"]), data.location
        changed, another = f"an earlier version of {now}, which has changed since", f"{before}, but {now} is a different data set"
        raise DataError(f"{run} was trained on {changed if before == now else another}", hint=hint)


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
    _check_data_set(out, record, data, NEW_RUN)

    # The weights that it started from
    before, now = record.get("start"), began.get("start")
    if (before and before["weights"]) != (now and now["weights"]):
        then = "with random weights" if before is None else f"with {before['description']}"
        wanted = "names no model" if now is None else f"starts from {now['description']}, which has different weights"
        more = f"add --init-from {before['model']}, or " if before and now is None else ""
        raise CheckpointError(f"{out} began {then}, but this command {wanted}", hint=more + NEW_RUN)

    # The settings
    lines = _changes(flatten(read_written_config(out / CONFIG_FILE)), flatten(config), MAY_CHANGE)
    if lines:
        raise ConfigError("\n".join([f"{out} holds a run with a different configuration:", *lines]), hint=NEW_RUN)


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], may_change: set[str]) -> list[str]:
    """A line for each setting that differs although it may not."""
    keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key) and key not in may_change)
    return [f"  {key}: {old.get(key)} in that run, {new.get(key)} now" for key in keys]


RECORD_KEY = "decay"
"""Key of a decayed run's record, for the run that it continues."""
_STABLE = ("wsd", "constant")
NEW_RUN = "choose another --out for a new run, or --resume never to start over here (the old run is moved aside)"


@dataclass(frozen=True)
class DecayStart:
    """The checkpoint of a run from which another run continues.

    Attributes:
        run: folder of the run.
        record: its run.json.
        config: its settings.
        contents: the checkpoint.
    """

    run: Path
    record: Mapping[str, Any]
    config: PretrainConfig
    contents: Contents

    @property
    def step(self) -> int:
        """Step of the checkpoint."""
        return self.contents.step

    def entry(self) -> dict[str, Any]:
        """Entries of the new run's record. Its weights began where those of the run began."""
        began = {key: value for key, value in self.record.items() if key == "start"}
        return {RECORD_KEY: {"run": str(self.run.resolve()), "step": self.step, **began}}


def run_of(path: Path) -> tuple[Path, int | None]:
    """The run and the step that `--decay-from` names: a run, or one of its folders `checkpoints/step-00001000`."""
    named = re.fullmatch(r"step-(\d{8,})", path.name)
    if named is None or path.resolve().parent.name != CHECKPOINTS:
        return path, None
    return path.resolve().parent.parent, int(named[1])


def open_start(path: Path, data: TokenData, warn: Callable[[str], None]) -> DecayStart:
    """Load the checkpoint that `--decay-from` names.

    Raises:
        ConfigError: the learning rate of the run is not at its peak there.
        DataError: the folder is not a run, or was trained on another data set.
        CheckpointError: it has no intact checkpoint.
    """
    run, step = run_of(path)
    record, config = read_record(run), read_written_config(run / CONFIG_FILE)
    _check_data_set(run, record, data, f"give the data of the run, as it was then: --data {' --data '.join(record['data'])}")
    contents = checkpoint.load_newest(run / CHECKPOINTS, warn) if step is None else checkpoint.load(path)
    if contents is None:
        raise CheckpointError(
            f"{run} has no checkpoint yet",
            hint="let it reach train.checkpoint_every_steps, or stop it with Ctrl-C, which saves a checkpoint",
        )

    # The learning rate must be at its peak
    optimizer, train = config.optimizer, config.train
    if optimizer.schedule not in _STABLE:
        raise ConfigError(
            f"{run} was trained with optimizer.schedule '{optimizer.schedule}', whose learning rate decays throughout; a decay "
            "begins at the constant rate of 'wsd' or 'constant'",
            hint=f"to train its weights with a new schedule: --init-from {run}",
        )
    begin = getattr(config.objective, "generator_warmup_steps", 0)  # both networks have a schedule of their own after it
    used = None if train.max_hours is None else contents.state.get("seconds", 0.0) / 3600 / train.max_hours
    last, length = contents.step - begin - 1, train.max_steps - begin
    if last + 1 < max(optimizer.warmup_steps, 1) or learning_rate(optimizer, last, length, used) < optimizer.learning_rate:
        raise ConfigError(
            f"at step {contents.step:,} of {run} the learning rate is not at its peak: that is within its warm-up or its decay",
            hint="give a checkpoint between the two; train.keep_checkpoints says how many are kept",
        )
    return DecayStart(run, record, config, contents)


def decay_settings(config: PretrainConfig, folder: Path, step: int, overrides: Sequence[str]) -> Resolved[PretrainConfig]:
    """The settings of the decayed run: those of the run, with a decay of as many steps as the user asks for.

    The number is `optimizer.decay_steps`, or that of which `optimizer.decay_fraction` of the whole run is decay.

    Args:
        config: settings of the run, or of the decayed run if that is resumed.
        folder: folder that they come from.
        step: step at which the decay begins.
        overrides: values of `--set`.

    Raises:
        ConfigError: a setting is invalid, or may not differ.
    """
    given = parse_overrides(overrides)
    if "optimizer.schedule" in given and given["optimizer.schedule"].value in ("wsd", config.optimizer.schedule):
        del given["optimizer.schedule"]  # that of the decay is always "wsd", even if the run's own is repeated
    origin = Origin("preset", f"run {folder}")
    base = {key: Setting(NONE if value is None else value, origin) for key, value in flatten(config).items()}
    # With a constant rate nothing is fitted to the length, which is not known yet.
    plain = resolve_pretrain_config(base | given | {"optimizer.schedule": Setting("constant", origin)}, may_end_early=True)
    optimizer, fraction = plain.config.optimizer, plain.config.optimizer.decay_fraction
    if optimizer.decay_steps is not None and ("optimizer.decay_steps" in given or "optimizer.decay_fraction" not in given):
        steps = optimizer.decay_steps
    else:
        steps = max(1, round(step * fraction / max(1 - fraction, 1e-9)))
    own = Origin("preset", f"decay from step {step}")
    changed = {
        "optimizer.schedule": "wsd",
        "optimizer.decay_steps": steps,
        "train.max_steps": step + steps,
        "train.max_hours": NONE,
    }
    settings: Settings = base | given | {key: Setting(value, own) for key, value in changed.items()}
    resolved = resolve_pretrain_config(settings, may_end_early=True)
    now = {key: value for key, value in flatten(plain.config).items() if key in given}
    before = {key: value for key, value in (flatten(config) | {"train.max_steps": step + steps}).items() if key in now}
    own_length = {"optimizer.decay_steps", "optimizer.decay_fraction"}
    lines = _changes(before, now, (MAY_CHANGE | own_length) - {"train.max_steps", "train.max_hours"})
    if lines:
        raise ConfigError(
            "\n".join([f"a decay continues {folder} with its own settings, but these differ:", *lines]),
            hint="leave them out; optimizer.decay_steps sets the number of steps",
        )
    return resolved


def risen_rate(before: PretrainConfig, now: PretrainConfig, step: int) -> str | None:
    """A warning if a run of schedule 'wsd' that has begun to decay is resumed with more steps; otherwise None.

    Args:
        before: settings that the run was trained with.
        step: step from which it is resumed.
    """
    if now.optimizer.schedule != "wsd" or now.train.max_hours is not None or now.train.max_steps <= before.train.max_steps:
        return None
    last = learning_rate(before.optimizer, step - 1, before.train.max_steps)
    following = learning_rate(now.optimizer, step, now.train.max_steps)
    if step <= now.optimizer.warmup_steps or last >= 0.9 * following:
        return None
    return (
        f"the learning rate had decayed to {last:.2g} by step {step:,}, and rises to {following:.2g} again in the longer run. To "
        "avoid this, decay into another folder (--decay-from) and continue the run itself"
    )


def write_start(out: Path, start: DecayStart, keep: int) -> None:
    """Write the checkpoint, and the metrics so far, into the folder of the decayed run, which then no longer needs the other.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    lines = [json.dumps(record) + "\n" for record in read_metrics(start.run) if record["step"] <= start.step]
    try:
        write_recorded(out, {METRICS_FILE: "".join(lines)})
    except OSError as problem:
        raise CheckpointError(
            f"could not write {out / METRICS_FILE}: {problem.strerror or problem}",
            hint="free some space, then run the same command again",
        ) from problem
    checkpoint.save(out / CHECKPOINTS, start.contents, keep)


# Weights, gradients and the two moments of AdamW, in float32.
_BYTES_A_PARAMETER = 16
# Before weights are divided, each process has them whole, and a copy of them.
_BYTES_BEFORE_DIVIDING = 8


def machine_memory(device: torch.device) -> int | None:
    """Bytes of memory of the GPU, or else of the machine or the limit of its container; None if unknown."""
    if device.type == "cuda":
        return int(torch.get_device_module(device).get_device_properties(device).total_memory)
    try:
        installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # no such name on this system
        return None
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text().strip() if limit.exists() else ""
    return min(installed, int(allowed)) if allowed.isdecimal() else installed


def another_tokenizer(data: object, fingerprint: str, model: ModelFolder) -> DataError:
    """The error if a data set was made with another tokenizer than a model.

    Args:
        fingerprint: fingerprint of the tokenizer of the data set.
    """
    return DataError(
        f"{data} was made with a different tokenizer ({fingerprint[:12]}) from that of {model.folder} "
        f"({model.tokenizer_fingerprints[0][:12]}): the same ids stand for other tokens",
        hint=f"prepare it again: discern prepare TEXT --out DATA --tokenizer {model.tokenizer_path}",
    )


def attach_teacher(objective: Objective, config: PretrainConfig, device: torch.device, tokenizer: str | None = None) -> None:
    """Give an objective the teacher that its settings name, if they do.

    Args:
        tokenizer: fingerprint of the data set's tokenizer; None: it is not compared.

    Raises:
        ConfigError: the teacher predicts no words, or not in rows of this length.
        DataError, CheckpointError: it cannot be read, or has another tokenizer.
    """
    if not isinstance(objective, MaskedLanguageModel) or objective.config.teacher is None:
        return
    model = open_model(Path(objective.config.teacher), warn=lambda _: None)
    if tokenizer is not None and tokenizer not in model.tokenizer_fingerprints:
        raise another_tokenizer("the data set", tokenizer, model)
    teacher = model.masked_language_model
    sizes, length = teacher.encoder.config, config.data.sequence_length
    if teacher.encoder.limits_positions(lambda name: getattr(sizes, name)) and sizes.max_positions < length:
        raise ConfigError(
            f"the teacher {model.folder} has {sizes.max_positions} positions, but rows have {length}",
            hint=f"--set data.sequence_length={sizes.max_positions}",
        )
    for part in teacher.parts():
        part.requires_grad_(False).to(device)
    objective.teachers = (teacher,)


def meta_objective(config: PretrainConfig, vocabulary: Vocabulary) -> Objective:
    """The objective of a run with its networks, and its teacher, on the meta device.

    Raises:
        ConfigError: its parts don't fit together.
    """
    with torch.device("meta"):
        objective = build_objective(config, vocabulary)
    attach_teacher(objective, config, torch.device("meta"))
    return objective


def check_parameters(config: PretrainConfig, vocabulary: Vocabulary, device: torch.device, processes: int = 1) -> None:
    """Make sure that the objective can be built, and that parameters, gradients and optimizer state fit into memory.

    Args:
        processes: number of processes that train together; on the CPU, they share the memory.

    Raises:
        ConfigError: its parts don't fit together or into the memory of the device, or the device lacks what they compute with.
    """
    if device.type == "mps" and getattr(config.objective, "masking", None) == "entropy":
        hint = "choose another masking, or --device cpu"
        raise ConfigError("objective.masking 'entropy' adds up in float64, which mps lacks", hint=hint)
    present = machine_memory(device)
    count = sum(parameter.numel() for parameter in meta_objective(config, vocabulary).parameters())
    shards = processes if config.train.divides_weights(processes) and device.type != "cpu" else 1
    needed = count * max(_BYTES_A_PARAMETER / shards, _BYTES_BEFORE_DIVIDING if shards > 1 else 0)
    if present is not None and needed > present:
        named = ("num_layers", "hidden_size", "feedforward_size")
        sizes = ", ".join(f"model.{name}={getattr(config.model, name)}" for name in named)
        raise ConfigError(
            f"{count:,} parameters ({sizes}) take {needed / 1e9:,.1f} GB with gradients and optimizer state, "
            f"but {'this machine' if device.type == 'cpu' else device} has {present / 1e9:,.1f} GB",
            hint="lower one of these sizes; `discern pretrain --dry-run` shows what a configuration needs",
        )
