"""Check the files of a run, a fine-tuned model, an export or a data set."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError
from safetensors.torch import load_file

from discern.data.dataset.manifest import MANIFEST_NAME, FileInfo, is_data_set, read_manifest
from discern.data.dataset.shards import TokenData
from discern.data.remote import remote_address
from discern.errors import ConfigError, DataError, DiscernError
from discern.model_files import finetuned
from discern.model_files.finetuned import (
    RESULTS_FILE,
    SCORES_FILE,
    is_finetuned,
    read_finetuned,
    read_results,
    read_scores,
)
from discern.model_files.hub import CONFIG_NAME
from discern.model_files.run import BLIMP_FILE, CHECKPOINTS, CONFIG_FILE, EVALUATION_FILE, RECORD_FILE, is_run, read_record
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
from discern.storage.files import utf8_name
from discern.training import checkpoint
from discern.training.checkpoint import check_finite
from discern.training.metrics_log import METRICS_FILE, read_metrics
from discern.training.pretrain_config import read_written_config

_ACCEPTED = ("*.json", "*.jsonl", "*.safetensors", "*.toml", "*.txt", "*.onnx")
"""Files that get a checksum if they have none."""
State = Literal["ok", "differs", "missing", "damaged", "unknown"]


@dataclass(frozen=True)
class CheckedFile:
    """State of one file.

    Attributes:
        name: path within the folder.
        state: 'ok'; 'differs' from its checksum; 'missing'; 'damaged': it cannot be read; 'unknown': it has no checksum.
        reason: the reason in words, unless the state is 'ok'.
    """

    name: str
    state: State
    reason: str = ""


@dataclass(frozen=True)
class CheckedFolder:
    """States of the files of a folder.

    Attributes:
        kind: kind of the folder, in words.
    """

    folder: Path
    kind: str
    files: list[CheckedFile]

    @property
    def problems(self) -> list[CheckedFile]:
        """The files that have changed since they were written."""
        return [each for each in self.files if each.state not in ("ok", "unknown")]


def check_folder(folder: Path, progress: Progress) -> CheckedFolder:
    """Read every file of a folder and compare it with its checksum, regardless of earlier checks and of `DISCERN_VERIFY`.

    Raises:
        DataError: the folder is none of these kinds.
    """
    kind, parts = _parts(folder)
    progress.start("checking files", len(parts), "files")
    files = []
    try:
        for name, check in parts:
            files.append(_checked(name, check))
            progress.advance(1)
    finally:
        progress.finish()
    return CheckedFolder(folder, kind, files)


@dataclass(frozen=True)
class Accepted:
    """A file whose checksum was rewritten. `before` is None if it had none, `after` if the file was removed."""

    name: str
    before: str | None
    after: str | None


def accept_folder(folder: Path, tell: Callable[[Accepted], None]) -> list[Accepted]:
    """Accept the files of a folder as they are, and rewrite their checksums.

    Files without a checksum get one. Checkpoints and the shards of data sets are not accepted, as nobody edits them on purpose.

    Args:
        tell: called with each change before it is written.

    Raises:
        ConfigError: a shard of a data set has changed.
        DataError: the folder is none of these kinds, or cannot be written.
    """
    _parts(folder)  # refuses folders of other kinds
    changes: list[Accepted] = []
    for each in reversed(_folders(folder)):  # that of an export lists the checksums of those in it
        patterns = (*_ACCEPTED, f"*/{CHECKSUMS_NAME}") if (each / CONFIG_NAME).is_file() else _ACCEPTED
        found = {str(path.relative_to(each)) for pattern in patterns for path in each.glob(pattern)}
        before = known_checksums(each)
        names = sorted((found | before.keys()) - {CHECKSUMS_NAME})
        try:
            after = {name: checksum(each / name) for name in names if (each / name).is_file()}
            changed = [name for name in names if before.get(name) != after.get(name)]
            for name in changed:
                if not name.endswith(CHECKSUMS_NAME):
                    changes.append(Accepted(str((each / name).relative_to(folder)), before.get(name), after.get(name)))
                    tell(changes[-1])
            if changed:
                update_checksums(each, after, new=True)
        except OSError as problem:
            raise DataError(
                f"cannot write to {folder}: {problem.strerror or problem}", hint="check the permissions of the folder"
            ) from problem
    if is_data_set(folder) and (problems := check_folder(folder, Silent()).problems):
        raise ConfigError(
            f"{folder / problems[0].name} has changed, and changed shards of a data set cannot be accepted",
            hint="run the same `discern prepare` again with --overwrite",
        )
    return changes


_Check = Callable[[], object]


def _parts(folder: Path) -> tuple[str, list[tuple[str, _Check]]]:
    """Kind of the folder, and the checks of its files by name."""
    if remote_address(folder) is not None:
        return "data set", list(_of_opened(TokenData.open(folder)))
    if is_data_set(folder):
        return "data set", _by_file(*_of_data(folder), *_of_checksums(folder))
    if is_finetuned(folder):
        return "fine-tuning", _by_file(*_of_finetuning(folder), *_of_checksums(folder))
    if is_run(folder):
        return "run", _by_file(*_of_run(folder), *_of_checksums(folder))
    if has_file(folder, CONFIG_NAME):
        listed = list(_of_checksums(folder))
        config = (CONFIG_NAME, partial(read_json, folder / CONFIG_NAME, hint=""))
        return ("export", listed) if (folder / CHECKSUMS_NAME).exists() else ("model", [config, *_of_model(folder)])
    state = "holds no run, fine-tuned model, export or data set" if folder.exists() else "does not exist"
    raise DataError(f"{folder} {state}", hint="give the folder of a run, a fine-tuned model, an export or a data set")


def _by_file(*parts: tuple[str, _Check]) -> list[tuple[str, _Check]]:
    """All checks of a file as one."""
    checks: dict[str, list[_Check]] = {}
    for name, check in parts:
        checks.setdefault(name, []).append(check)
    return [(name, partial(_run_all, several)) for name, several in checks.items()]


def _run_all(checks: list[_Check]) -> None:
    for check in checks:
        check()


def _of_data(folder: Path) -> Iterator[tuple[str, _Check]]:
    try:
        data = TokenData(folder, read_manifest(folder))
    except DataError as problem:
        yield MANIFEST_NAME, partial(_raise, problem)
        return
    yield from _of_opened(data)


def _of_opened(data: TokenData) -> Iterator[tuple[str, _Check]]:
    yield MANIFEST_NAME, lambda: None
    yield "tokenizer.json", data.tokenizer
    for name, file in data.manifest.files.items():
        yield name, partial(_compare_file, data, name, file)


def _compare_file(data: TokenData, name: str, expected: FileInfo) -> None:
    """Compare a file of a data set, which is fetched if it is elsewhere."""
    _compare(data.folder / name if data.remote is None else data.remote.fetch(name, expected), expected.sha256)


def _of_run(folder: Path) -> Iterator[tuple[str, _Check]]:
    yield RECORD_FILE, partial(read_record, folder)
    yield CONFIG_FILE, partial(read_written_config, folder / CONFIG_FILE)
    yield METRICS_FILE, partial(read_metrics, folder, _refuse)
    for name in (EVALUATION_FILE, BLIMP_FILE):
        if (folder / name).is_file():
            yield name, partial(read_json, folder / name, hint="")
    for path in checkpoint.found(folder / CHECKPOINTS):
        yield f"{CHECKPOINTS}/{path.name}", partial(checkpoint.load, path)


def _of_finetuning(folder: Path) -> Iterator[tuple[str, _Check]]:
    yield finetuned.RECORD_FILE, partial(read_finetuned, folder)
    if (folder / RESULTS_FILE).is_file():
        yield RESULTS_FILE, partial(read_results, folder)
    for path in sorted(folder.glob(f"seed-*/{SCORES_FILE}")):
        yield f"{path.parent.name}/{SCORES_FILE}", partial(read_scores, path.parent)


def _of_model(folder: Path) -> Iterator[tuple[str, _Check]]:
    """Weights in a folder without checksums, which can only be read."""
    for path in sorted(folder.glob("*.safetensors")):
        yield path.name, partial(_weights, path, known=False)


def _of_checksums(folder: Path) -> Iterator[tuple[str, _Check]]:
    for each in _folders(folder):
        prefix = "" if each == folder else f"{each.relative_to(folder)}/"
        try:
            known = read_checksums(each)
        except DataError as problem:
            yield prefix + CHECKSUMS_NAME, partial(_raise, problem)
            continue
        if not known and each == folder:
            yield CHECKSUMS_NAME, (folder / CHECKSUMS_NAME).stat
        for name, entry in known.items():
            if (each / name).is_file() or has_file(each, name):
                yield prefix + name, partial(_compare, each / name, *entry.split("|"))


def _folders(folder: Path) -> list[Path]:
    """Folders that may have checksums: the folder itself and those in it. Checkpoints are checked on their own."""
    below = sorted(path for path in folder.rglob("*") if path.is_dir())
    skipped = re.compile(rf"{CHECKPOINTS}|best|\.")
    return [folder, *(path for path in below if not any(map(skipped.match, path.relative_to(folder).parts)))]


class _DiffersError(DataError):
    pass


class _UnknownError(DataError):
    pass


def _checked(name: str, check: _Check) -> CheckedFile:
    try:
        check()
    except FileNotFoundError:
        return CheckedFile(name, "missing", "the file does not exist")
    except _DiffersError as problem:
        return CheckedFile(name, "differs", problem.message)
    except _UnknownError as problem:
        return CheckedFile(name, "unknown", problem.message)
    except DiscernError as problem:
        return CheckedFile(name, "damaged", problem.message)
    except OSError as problem:
        return CheckedFile(name, "damaged", problem.strerror or str(problem))
    return CheckedFile(name, "ok")


def _compare(path: Path, *expected: str) -> None:
    """Compute the checksum of a file again, even if it was checked before."""
    found = checksum(path)
    if found not in expected:
        raise _DiffersError(f"its SHA-256 is {found[:12]}..., expected {expected[-1][:12]}...")
    if path.suffix == ".safetensors":
        _weights(path)


def _weights(path: Path, *, known: bool = True) -> None:
    try:
        with utf8_name(path) as readable:
            check_finite(load_file(readable), path)
    except (SafetensorError, ValueError) as problem:
        raise DataError(f"it cannot be read: {problem}") from problem
    if not known:
        raise _UnknownError(f"it can be read, and its weights are finite; there is no {CHECKSUMS_NAME} to compare it with")


def _raise(problem: DataError) -> None:
    raise problem


def _refuse(message: str) -> None:
    raise DataError(message)
