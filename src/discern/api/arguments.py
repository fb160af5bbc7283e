"""Checks of arguments that the command line checks by itself."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import wraps
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from discern.errors import ConfigError, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


def checks_choices(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse values that the annotations of a function, such as `Literal["auto", "never"]`, do not list.

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
        return function(*args, **kwargs)

    return checked


def _choices(hint: Any) -> tuple[str, ...]:
    """The names that a parameter may have; none if it may have any other value than these and None."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    found = [_choices(option) for option in options if option is not NoneType]
    return tuple(itertools.chain(*found)) if all(found) else ()
