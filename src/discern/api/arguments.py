"""What the functions of Python need in place of the command line: checks of arguments, messages and progress."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from discern.config.schema import toml_value
from discern.errors import ConfigError, DiscernError, did_you_mean
from discern.progress import Silent
from discern.wording import in_python

P = ParamSpec("P")
R = TypeVar("R")


class Logged(Silent):
    """A listener for library use. Lines go to the logger `discern`; bars are not shown."""

    def note(self, message: str) -> None:
        warns = message.startswith("warning: ")
        message = in_python(message.removeprefix("warning: "))
        logging.getLogger("discern").log(logging.WARNING if warns else logging.INFO, "%s", message)


@contextmanager
def python_errors(translate: Callable[[str], str] = in_python) -> Iterator[None]:
    """Name the options of the command line in errors as the parameters of the function.

    Args:
        translate: rewrites a message about options.
    """
    try:
        yield
    except DiscernError as error:
        error.message = translate(error.message)
        error.hint = error.hint and translate(error.hint)
        error.args = (error.message,)
        raise


def checks_choices(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse values that the annotations of a function, such as `Literal["auto", "never"]`, do not list.

    Errors of the function name its parameters instead of the options of the command line.

    Raises:
        ConfigError: when called with such a value.
    """
    signature = inspect.signature(function)
    choices = {name: names for name, hint in get_type_hints(function).items() if (names := _choices(hint))}

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # whose message names the function
        for name, known in choices.items():
            value = given.get(name)
            if value is not None and value not in known:
                raise ConfigError(
                    f"{name} is {value!r}, expected one of {', '.join(map(repr, known))}", hint=did_you_mean(str(value), known)
                )
        with python_errors():
            return function(*args, **kwargs)

    return checked


def _choices(hint: Any) -> tuple[str, ...]:
    """The names that a parameter may have; none if it may have any other value than these and None."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    found = [_choices(option) for option in options if option is not NoneType]
    return tuple(itertools.chain(*found)) if all(found) else ()


def requested_tasks(
    names: Sequence[str], folders: Sequence[Path], files: Mapping[str, object]
) -> tuple[list[tuple[str, Path]], list[str]]:
    """The named tasks with their folders, and the settings of a task whose files are the user's own.

    Args:
        names: names of tasks that the user gave; 'pairs' has files of the user's own.
        folders: a folder for each of them, or one for all.
        files: files and columns of the user's own, by setting of `files`; None: not given.

    Raises:
        ConfigError: the number of folders differs, or files are given for a named task, or none for `pairs`.
    """
    settings = [f"files.{name}={toml_value(str(value))}" for name, value in files.items() if value is not None]
    if "pairs" in names:
        if len(names) > 1 or folders or files["train"] is None:
            raise ConfigError(
                "task 'pairs' is trained alone, on a file of your own",
                hint="discern finetune MODEL --task pairs --train pairs.csv --dev judged.csv --out OUT",
            )
        return [], ["files.task=pairs", *settings]
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
