"""Checkpoints that are either complete or absent.

A checkpoint is written to a temporary folder, synced to disk, checksummed and renamed: at any time the newest complete one can
be loaded. No file is a pickle. `model.safetensors` contains no time and no path, so equal weights give equal bytes.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from discern.errors import CheckpointError, DataError, NumericsError
from discern.storage.checksums import CHECKSUMS_NAME, Record, checksum, read_checksums, read_json, verification_is_on
from discern.storage.files import sync_file, sync_folder, utf8_name

FORMAT = 1
MODEL_FILE, OPTIMIZER_FILE, CARRY_FILE = "model.safetensors", "optimizer.safetensors", "carry.safetensors"
AVERAGE_FILE = "average.safetensors"
STATE_FILE, CHECKSUM_FILE = "state.json", CHECKSUMS_NAME
_PART = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
"""A file of one of several ranks, as torch.distributed.checkpoint names it."""
_EARLIER = "to use the previous checkpoint, remove this folder"
_UNREADABLE = "restore access to it, then run the same command again; nothing was changed"


@dataclass(frozen=True)
class Contents:
    """Contents of a checkpoint.

    Attributes:
        model: every parameter once, by name, to continue training from.
        optimizer: moments by parameter name.
        carry: tensors that the objective keeps from step to step.
        state: step, tokens, seconds and a description of the run, as plain JSON.
        average: moving average of `model`, under the same names; empty if the run keeps none.
    """

    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    carry: Mapping[str, Tensor]
    state: Mapping[str, Any]
    average: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The weights to use: the average if there is one, otherwise those of the last step."""
        return self.average or self.model

    @property
    def step(self) -> int:
        """Number of updates when the checkpoint was written."""
        return int(self.state["step"])


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer once, detached; shared ones under their first name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}


def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copy weights into a model.

    Raises:
        CheckpointError: a weight is missing, unexpected, or has another shape.
    """
    own = model_tensors(model)
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or extra:
        raise CheckpointError(
            f"{source} does not fit this model: {len(missing)} weights missing ({', '.join(missing[:3])}), "
            f"{len(extra)} left over ({', '.join(extra[:3])})"
        )
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise CheckpointError(
                f"{source}: '{name}' has shape {tuple(tensors[name].shape)}, the model expects {tuple(tensor.shape)}"
            )
        tensor.copy_(tensors[name])


def save(folder: Path, contents: Contents, keep: int) -> Path:
    """Write `folder/step-XXXXXXXX`, then remove all but the newest `keep`.

    Raises:
        CheckpointError: it could not be written. Earlier checkpoints are intact, and nothing incomplete remains.
    """
    try:
        partial = make_partial(folder, contents.step)
        groups = {MODEL_FILE: contents.model, OPTIMIZER_FILE: contents.optimizer}
        groups |= {CARRY_FILE: contents.carry} if contents.carry else {}
        groups |= {AVERAGE_FILE: contents.average} if contents.average else {}
        for name, tensors in groups.items():
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, partial / name, {"format": "pt"})
        return publish(folder, contents.state, {name: checksum(partial / name) for name in groups}, keep)
    except (OSError, SafetensorError) as problem:
        discard_partial(folder, contents.step)
        raise not_written(folder, contents.step, str(problem)) from problem


def partial_folder(folder: Path, step: int) -> Path:
    """The folder in which the checkpoint of a step is written before it is published."""
    return folder / f".step-{step:08d}.partial"


def make_partial(folder: Path, step: int) -> Path:
    """Create that folder, empty."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = partial_folder(folder, step)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    return partial


def discard_partial(folder: Path, step: int) -> None:
    """Remove that folder."""
    shutil.rmtree(partial_folder(folder, step), ignore_errors=True)


def publish(folder: Path, state: Mapping[str, Any], sums: Mapping[str, str], keep: int) -> Path:
    """Complete the checkpoint in the partial folder, whose tensors are written and synced, and give it its name.

    Args:
        sums: checksums of the files of tensors.

    Raises:
        OSError: it could not be written.
    """
    step = int(state["step"])
    final, partial = folder / f"step-{step:08d}", partial_folder(folder, step)
    (partial / STATE_FILE).write_text(json.dumps({"format": FORMAT, **state}, indent=1) + "\n")
    complete = {**sums, STATE_FILE: checksum(partial / STATE_FILE)}
    (partial / CHECKSUM_FILE).write_text(json.dumps(complete, indent=1) + "\n")
    mode = (partial / STATE_FILE).stat().st_mode
    for name in [*complete, CHECKSUM_FILE]:
        # safetensors makes files that only their owner can read; a run follows the umask.
        (partial / name).chmod(mode)
        with (partial / name).open("rb") as file:
            sync_file(file)
    sync_folder(partial)
    if final.exists():
        _discard(final)
    partial.rename(final)
    sync_folder(folder)
    # A checkpoint beyond this step was damaged when the run was resumed; it stays until it is replaced.
    for path in [path for path in found(folder) if step_of(path) <= step][keep:]:
        with suppress(OSError):  # a remaining one is either complete or renamed, and does no harm
            _discard(path)
    return final


def not_written(folder: Path, step: int, problem: str) -> CheckpointError:
    """The error about a checkpoint that could not be written."""
    good = found(folder)
    return CheckpointError(
        f"could not write the checkpoint of step {step} to {folder}: {problem}",
        hint=f"free some space and run the same command again; the last good checkpoint is "
        f"{good[0].name if good else 'none: the run starts over'}",
    )


def step_of(path: Path) -> int:
    """The step of a checkpoint, by its name."""
    return int(path.name.removeprefix("step-"))


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint in a folder, without checking it; 0 if there is none."""
    return max(map(step_of, found(folder)), default=0)


def found(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first, without checking them.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    try:
        return sorted((path for path in folder.iterdir() if re.fullmatch(r"step-\d{8,}", path.name)), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as problem:
        raise CheckpointError(f"{folder} cannot be read: {problem.strerror or problem}", hint=_UNREADABLE) from problem


def load_newest(folder: Path, warn: Callable[[str], None], *, carry: bool = True) -> Contents | None:
    """Load the newest intact checkpoint; None if there is no checkpoint. Damaged ones are reported to `warn` and skipped.

    Args:
        carry: as in `load`.

    Raises:
        CheckpointError: there are checkpoints, but none is intact; or one cannot be read, which says nothing about its content.
        NumericsError: the newest intact one has weights that are not finite. The user decides whether to go back further.
    """
    problems: list[str] = []
    for path in found(folder):
        try:
            return load(path, carry=carry)
        except CheckpointError as problem:
            if _is_unreadable(problem):
                raise CheckpointError(problem.message, hint=_UNREADABLE) from problem
            problems.append(problem.message)
            warn(f"{problem.message}; trying the checkpoint before it")
    if problems:
        raise CheckpointError(
            f"none of the {len(problems)} checkpoints in {folder} is intact; the newest: {problems[0]}",
            hint="start over with --resume never, or restore the folder from a copy",
        )
    return None


def _is_unreadable(problem: BaseException | None) -> bool:
    """Whether an error was caused by one of the system, other than that a file does not exist."""
    if isinstance(problem, OSError):
        return not isinstance(problem, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    return problem is not None and _is_unreadable(problem.__cause__)


def load(path: Path, *, carry: bool = True) -> Contents:
    """Load one checkpoint after comparing every file with its checksum.

    Args:
        carry: whether to load the tensors that the objective keeps, too. Only training needs them, and they may be large.

    Raises:
        CheckpointError: a file is missing, truncated, altered or of another format version.
        NumericsError: a weight is not finite.
    """
    divided = check_files(path)
    state = read_json(path / STATE_FILE, _State, hint=_EARLIER, version=FORMAT, error=CheckpointError)
    if divided:
        from discern.training.sharding import read_sharded  # imports torch.distributed

        groups = {MODEL_FILE: dict[str, Tensor]()}
        for key, tensor in read_sharded(path).items():
            file, _, name = key.partition("/")
            groups.setdefault(f"{file}.safetensors", {})[name] = tensor
    else:
        names = {MODEL_FILE, OPTIMIZER_FILE, AVERAGE_FILE, *([CARRY_FILE] if carry else [])}
        groups = {name: _tensors(path / name) for name in names if (path / name).exists()}
    model, average = groups[MODEL_FILE], groups.get(AVERAGE_FILE, {})
    check_finite(model, path / MODEL_FILE)
    check_finite(average, path / AVERAGE_FILE)
    return Contents(model, groups.get(OPTIMIZER_FILE, {}), groups.get(CARRY_FILE, {}) if carry else {}, state, average)


def check_files(path: Path) -> bool:
    """Compare every file of a checkpoint with its checksum. Return whether several ranks have written it.

    Raises:
        CheckpointError: a file is missing, truncated or altered.
    """
    try:
        sums = read_checksums(path)
        divided = any(map(_PART.fullmatch, sums))
        if STATE_FILE not in sums or not (divided or {MODEL_FILE, OPTIMIZER_FILE} <= sums.keys()):
            raise CheckpointError(f"{path / CHECKSUM_FILE} is missing, or does not name every file", hint=_EARLIER)
        for name, expected in sums.items():
            with (path / name).open("rb"):  # without verification, too
                if verification_is_on() and checksum(path / name) != expected:
                    raise CheckpointError(f"{path}: {name} is damaged (its checksum differs)", hint=_EARLIER)
        return divided
    except DataError as problem:
        raise CheckpointError(problem.message, hint=_EARLIER) from problem
    except OSError as problem:
        reason = "is missing" if isinstance(problem, FileNotFoundError) else f"cannot be read: {problem.strerror or problem}"
        raise CheckpointError(f"{problem.filename or path} {reason}", hint=_EARLIER) from problem


class _State(Record):
    format: int
    step: Annotated[int, Field(ge=0)]


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        with utf8_name(path) as readable:
            return load_file(readable)
    except (OSError, SafetensorError, ValueError) as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}", hint=_EARLIER) from problem


def clean(folder: Path) -> None:
    """Remove checkpoints that a killed process left half-written or half-removed."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.startswith(".step-"):
                shutil.rmtree(path, ignore_errors=True)


def _discard(path: Path) -> None:
    # Renamed first: a kill while files are being removed must not leave something that looks like a checkpoint.
    doomed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def check_finite(tensors: Mapping[str, Tensor], source: Path) -> None:
    """Check that no tensor contains NaN or infinite values.

    Args:
        source: file that contains the tensors.

    Raises:
        NumericsError: a tensor does; the message names it.
    """
    for name, tensor in tensors.items():
        # A finite sum has finite terms only, which takes one pass and no copy. A sum may overflow even if all terms are finite.
        if not tensor.is_floating_point() or torch.isfinite(tensor.sum(dtype=torch.float32)):
            continue
        wrong = int(tensor.numel() - torch.isfinite(tensor).sum())
        if wrong:
            kind = "NaN" if torch.isnan(tensor).any() else "infinite values"
            raise NumericsError(
                f"{source}: '{name}' holds {kind} ({wrong:,} of {tensor.numel():,} values are not finite)",
                hint="training diverged, or the file is damaged: go back to an earlier checkpoint, or create the model again",
            )
