"""Check the files of a run, a fine-tuned model, an export or a data set, or accept them as they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from discern.data.dataset.manifest import MANIFEST_NAME, is_data_set, read_manifest
from discern.data.dataset.remote import RemoteFolder
from discern.data.remote import remote_address
from discern.errors import ConfigError, DataError, DiscernError
from discern.model_files.finetuned import is_finetuned
from discern.model_files.hub import CONFIG_NAME
from discern.model_files.run import CHECKPOINTS, is_run
from discern.progress import Progress, Silent
from discern.storage.checksums import (
    CHECKSUMS_NAME,
    checksum,
    has_file,
    known_checksums,
    read_checksums,
    read_json,
    update_checksums,
)
from discern.storage.files import cannot_write, utf8_name
from discern.training import checkpoint
from discern.training.metrics import METRICS_FILE, read_metrics

_Check = Callable[[], object]
_ACCEPTED = ("*.json", "*.jsonl", "*.safetensors", "*.toml", "*.txt", "*.onnx")
"""Files that get a checksum if they have none."""


# What is read of the files that have no checksum, by kind of folder.
_READERS: Mapping[str, Mapping[str, Callable[[Path], object]]] = {
    "data set": {MANIFEST_NAME: lambda path: read_manifest(path.parent)},
    # The log has a checksum once the run has ended.
    "run": {METRICS_FILE: lambda path: read_metrics(path.parent, _refuse), f"{CHECKPOINTS}/step-*": checkpoint.load},
    "model": {CONFIG_NAME: partial(read_json, hint=""), "*.safetensors": lambda path: _read_weights(path)},
}


def check_folder(folder: Path, progress: Progress) -> dict[str, Any]:
    """Read every file of a folder and compare it with its checksum, regardless of earlier checks and of `DISCERN_VERIFY`.

    Returns:
        `kind` of the folder; `files`: name, state and reason of each; `problems`: number of files that are not intact. A file is
        'ok'; 'differs' from its checksum; 'missing'; 'damaged': it cannot be read; or 'unknown': it has no checksum.

    Raises:
        DataError: the folder is none of these kinds.
    """
    kind = _kind(folder)
    checks, files = list(_contents(folder, kind)), []
    progress.start("checking files", len(checks), "files")
    for path, check in checks:
        state, reason = _state(check, kind)
        files.append({"name": str(path.relative_to(folder)), "state": state, "reason": reason})
        progress.advance(1)
    progress.finish()
    problems = sum(file["state"] not in ("ok", "unknown") for file in files)
    return {"folder": str(folder), "kind": kind, "problems": problems, "files": files}


def accept_folder(folder: Path) -> dict[str, Any]:
    """Accept the files of a folder as they are, and rewrite their checksums.

    Files without a checksum get one. Checkpoints and the shards of data sets are not accepted, as nobody edits them on purpose.

    Returns:
        `accepted`: name, checksum `before` (None if it had none) and `after` (None if the file was removed) of each change.

    Raises:
        ConfigError: a shard of a data set has changed.
        DataError: the folder is none of these kinds, or cannot be written.
    """
    kind = _kind(folder)
    changes: list[dict[str, str | None]] = []
    for each in reversed(_folders(folder)):  # that of an export lists the checksums of those in it
        patterns = (*_ACCEPTED, f"*/{CHECKSUMS_NAME}") if (each / CONFIG_NAME).is_file() else _ACCEPTED
        found = {str(path.relative_to(each)) for pattern in patterns for path in each.glob(pattern)}
        before = known_checksums(each)
        names = sorted((found | before.keys()) - {CHECKSUMS_NAME})
        try:
            after = {name: checksum(each / name) for name in names if (each / name).is_file()}
            if changed := [name for name in names if before.get(name) != after.get(name)]:
                update_checksums(each, after, new=True)
        except OSError as problem:
            raise cannot_write(folder, problem) from problem
        changes += [
            {"name": str((each / name).relative_to(folder)), "before": before.get(name), "after": after.get(name)}
            for name in changed
            if not name.endswith(CHECKSUMS_NAME)
        ]
    if kind == "data set" and check_folder(folder, Silent())["problems"]:
        raise ConfigError(
            f"shards of {folder} have changed, and changed shards of a data set cannot be accepted",
            hint="run the same `discern prepare` again with --overwrite",
        )
    return {"folder": str(folder), "accepted": changes}


def _kind(folder: Path) -> str:
    if remote_address(folder) is not None or is_data_set(folder):
        return "data set"
    if is_finetuned(folder):
        return "fine-tuning"
    if is_run(folder):
        return "run"
    if has_file(folder, CONFIG_NAME):
        return "export" if (folder / CHECKSUMS_NAME).exists() else "model"
    state = "holds no run, fine-tuned model, export or data set" if folder.exists() else "does not exist"
    raise DataError(f"{folder} {state}", hint="give the folder of a run, a fine-tuned model, an export or a data set")


def _contents(folder: Path, kind: str) -> Iterator[tuple[Path, _Check]]:
    """The files of a folder and their checks; some files have two."""
    if (address := remote_address(folder)) is not None:
        remote = RemoteFolder.open(address)
        for name, file in read_manifest(remote.folder).files.items():
            yield folder / name, partial(remote.fetch, name, file)  # which compares the checksum
        return
    for pattern, read in _READERS.get(kind, {}).items():
        yield from ((path, partial(read, path)) for path in sorted(folder.glob(pattern)))
    if kind == "data set":
        with suppress(DataError):  # a damaged manifest, which is among the files
            for name, file in read_manifest(folder).files.items():
                yield folder / name, partial(_compare, folder / name, file.sha256)
    for each in _folders(folder):
        checksums = each / CHECKSUMS_NAME
        if checksums.exists():
            yield checksums, partial(read_checksums, each)
        elif each == folder and kind != "model":
            yield checksums, checksums.stat
        for name, entry in known_checksums(each).items():
            if has_file(each, name):
                yield each / name, partial(_compare, each / name, *entry.split("|"))


def _folders(folder: Path) -> list[Path]:
    """Folders that may have checksums: the folder itself and those in it. Checkpoints are checked on their own."""
    below = sorted(path for path in folder.rglob("*") if path.is_dir())
    skipped = re.compile(rf"{CHECKPOINTS}|best|\.")
    return [folder, *(path for path in below if not any(map(skipped.match, path.relative_to(folder).parts)))]


def _compare(path: Path, *expected: str) -> None:
    """Compute the checksum of a file again, even if it was checked before."""
    digest = checksum(path)
    if digest not in expected:
        raise _ChecksumError(f"its SHA-256 is {digest[:12]}..., expected {expected[-1][:12]}...")
    if path.suffix == ".safetensors":
        _read_weights(path)


def _read_weights(path: Path) -> None:
    try:
        with utf8_name(path) as readable:
            checkpoint.check_finite(load_file(readable), path)
    except (SafetensorError, ValueError) as problem:
        raise DataError(f"it cannot be read: {problem}") from problem


class _ChecksumError(DataError):
    """The content of a file does not have its checksum."""


def _refuse(message: str) -> None:
    raise DataError(message)


def _state(check: _Check, kind: str) -> tuple[str, str]:
    """State of a file, and the reason in words unless it is 'ok'."""
    try:
        check()
    except DiscernError as problem:
        return "differs" if isinstance(problem, _ChecksumError) else "damaged", problem.message
    except OSError as problem:
        return "missing" if isinstance(problem, FileNotFoundError) else "damaged", problem.strerror or str(problem)
    return ("unknown", f"it can be read; there is no {CHECKSUMS_NAME} to compare it with") if kind == "model" else ("ok", "")
