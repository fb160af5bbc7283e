"""Tasks that are requested by name, although their files are the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from discern.config.schema import toml_value
from discern.errors import ConfigError

OWN_TASKS = ("pairs",)


def requested_tasks(
    names: Sequence[str], folders: Sequence[Path], files: Mapping[str, object]
) -> tuple[list[tuple[str, Path]], list[str]]:
    """The named tasks with their folders, and the settings of a task whose files are the user's own.

    Args:
        names: names of tasks that the user gave.
        folders: a folder for each of them, or one for all.
        files: files and columns of the user's own, by setting of `files`; None: not given.

    Raises:
        ConfigError: the number of folders differs, or files are given for a named task, or none for a task without a name.
    """
    settings = [f"files.{name}={toml_value(str(value))}" for name, value in files.items() if value is not None]
    own = [name for name in names if name in OWN_TASKS]
    if own and len(names) > 1:
        raise ConfigError(
            f"task '{own[0]}' can only be trained alone, but {len(names)} tasks are given", hint="leave out the others"
        )
    if own and (folders or files["train"] is None):
        found = "a folder of a task" if folders else "no file"
        raise ConfigError(
            f"task '{own[0]}' trains on a file of your own, but {found} is given",
            hint=f"discern finetune MODEL --task {own[0]} --train pairs.csv --dev judged.csv --out OUT",
        )
    if own:
        return [], [f"files.task={own[0]}", *settings]
    if names and len(folders) == 1:
        folders = [*folders] * len(names)
    if len(names) != len(folders):
        raise ConfigError(
            f"expected one --data for each --task, found {len(names)} --task and {len(folders)} --data",
            hint="give --task NAME --data DIR once for each task",
        )
    if names and settings:
        raise ConfigError("a named task has its own files and columns", hint="leave out --task, or --train and the columns")
    return list(zip(names, folders, strict=True)), settings
