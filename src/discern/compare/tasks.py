"""Search for the folders of a comparison's tasks, by the names that such folders usually have."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from discern.errors import DataError
from discern.finetuning.data import find_files, find_splits
from discern.tasks import tasks as registry

# Besides the task's own name; case and characters other than letters and digits are ignored.
_USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "sst2": ("sst",),
    "stsb": ("sts",),
    "chunk": ("conll2000", "conll00", "chunking"),
    "ner": ("conll2003", "conll03"),
    "weibo-ner": ("weibo",),
    "squad1": ("squad11", "squadv11", "squadv1", "squad"),
    "squad2": ("squad20", "squadv20", "squadv2"),
    "cmrc2018": ("cmrc",),
    "naturalqs": ("naturalquestions", "naturalquestionsshort"),
    "squad-mrqa": ("mrqasquad",),
}
_DEPTH = 2  # task-data/RTE, task-data/glue/RTE


@dataclass(frozen=True)
class TaskFolder:
    """A task and its files.

    Attributes:
        files: sha256 of each file by split; scores are valid for these files only.
    """

    name: str
    folder: Path
    files: Mapping[str, str]


def find_task_folders(names: Iterable[str], root: Path | None, given: Mapping[str, Path]) -> list[TaskFolder]:
    """The folder of each task: the given one, or the first below `root` that has its name and its files.

    Raises:
        DataError: a folder is missing; the message lists the names searched for and the folders found.
    """
    tasks = list(names)
    below = _below(root) if root is not None else []
    folders = {task: given[task] if task in given else _find(task, below) for task in tasks}
    missing = [task for task, folder in folders.items() if folder is None]
    if missing:
        raise DataError("\n".join([_where(root, below), *(f"- {_looked_for(task)}" for task in missing)]), hint=_HINT)
    return [TaskFolder(task, folder, _hashed(task, folder)) for task, folder in folders.items() if folder is not None]


_HINT = "--task-data FOLDER, which holds one folder per task; or in the TOML file: [task_data] rte = 'path/to/RTE'"


def _find(task: str, below: Iterable[Path]) -> Path | None:
    wanted = [_bare(name) for name in _names(task)]
    definition = registry.load(task)
    fitting = [path for path in below if _bare(path.name) in wanted and "train" in find_splits(definition, path)]
    return min(fitting, key=lambda path: (wanted.index(_bare(path.name)), len(path.parts), path), default=None)


def _below(root: Path) -> list[Path]:
    """The folder itself and the folders in it, down to `_DEPTH` levels."""
    if not root.is_dir():
        raise DataError(f"--task-data {root} is not a folder", hint="give the folder that holds the folders of the tasks")
    level, found = [root.resolve()], [root.resolve()]
    for _ in range(_DEPTH):
        level = [path for parent in level for path in _folders(parent)]
        found += level
    return found


def _folders(parent: Path) -> list[Path]:
    """The folders in `parent`, sorted by name; none if it cannot be read, such as lost+found."""
    try:
        return [path for path in sorted(parent.iterdir()) if path.is_dir() and path.name[0] != "."]
    except PermissionError:
        return []


def _names(task: str) -> tuple[str, ...]:
    return (task, *_USUAL_NAMES.get(task, ()))


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _where(root: Path | None, below: list[Path]) -> str:
    if root is None:
        return "neither --task-data nor a [task_data] folder is given for these tasks:"
    held = ", ".join(path.name for path in below[1:21]) or "no folders"
    return f"{root} contains no folder with a training file of these tasks (it contains {held}):"


def _looked_for(task: str) -> str:
    return f"{task}: looked for a folder called {' or '.join(_names(task))}, upper or lower case, with or without - and _"


def _hashed(task: str, folder: Path) -> dict[str, str]:
    files = find_files(registry.load(task), folder)
    hashes = {}
    for split, path in sorted(files.paths.items()):
        with path.open("rb") as stream:
            hashes[split] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashes
