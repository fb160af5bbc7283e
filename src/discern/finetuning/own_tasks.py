"""Tasks that are requested by name, although their files are the user's own."""

from __future__ import annotations

from collections.abc import Sequence

from discern.errors import ConfigError

OWN_TASKS = ("pairs",)


def without_own_task(names: Sequence[str], *, has_data: bool, has_train: bool) -> tuple[list[str], list[str]]:
    """The names of tasks that bring their own files, and the settings that ask for another task by `files.task`.

    Args:
        names: names that the user gave.
        has_data: whether folders of tasks are given.
        has_train: whether a file to train on is given.

    Raises:
        ConfigError: such a task is combined with others, or has no file.
    """
    own = [name for name in names if name in OWN_TASKS]
    if not own:
        return list(names), []
    if len(names) > 1:
        raise ConfigError(
            f"task '{own[0]}' can only be trained alone, but {len(names)} tasks are given", hint="leave out the others"
        )
    if has_data or not has_train:
        found = "a folder of a task" if has_data else "no file"
        raise ConfigError(
            f"task '{own[0]}' trains on a file of your own, but {found} is given",
            hint=f"discern finetune MODEL --task {own[0]} --train pairs.csv --dev judged.csv --out OUT",
        )
    return [], [f"files.task={own[0]}"]
