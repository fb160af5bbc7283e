"""What the functions of Python need in place of the command line: checks of arguments, messages and progress."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

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
def python_errors(**names: str) -> Iterator[None]:
    """Name the options of the command line in errors as the parameters of the function.

    Args:
        names: parameters that are called differently than the options, by option.
    """
    try:
        yield
    except DiscernError as error:
        error.message = in_python(error.message, names)
        error.hint = error.hint and in_python(error.hint, names)
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
