"""Check that no verb overwrites its inputs, from the parameters of each verb, before any work."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, get_args

import typer

from discern.artifacts.guard import check_apart, check_not_inside
from discern.cli.console import print_error
from discern.errors import ConfigError

OUTPUTS = {"out": "--out", "html": "--html", "submission": "--submission"}
"""Parameters that say where a verb writes. Every other path is read."""

OWN = ("report.html",)
"""Made for the folder that they lie in."""

# Read to the end before anything is written, and may be the very one of the folder that is written: a run's own config.toml.
_READ_BEFORE = ("config", "tokenizer")


def guarded(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The same verb, which first makes sure that its outputs are none of its inputs, nor inside or around them."""

    @wraps(verb)
    def checked(**values: Any) -> Any:
        reads = [path for name in inputs_of(verb) for path in _paths(values.get(name))]
        try:
            for name, option in OUTPUTS.items():
                for out in _paths(values.get(name)):
                    check_apart(option, out, *reads, own=OWN)
                    for name in _READ_BEFORE:
                        for read in _paths(values.get(name)):
                            check_not_inside(option, out, read)
        except ConfigError as error:
            print_error(error.message, error.hint)
            raise SystemExit(error.exit_code) from None
        return verb(**values)

    return checked


def inputs_of(verb: Callable[..., Any]) -> list[str]:
    """Names of the parameters that hold paths to read: arguments, and options that are paths."""
    return [
        name
        for name, (annotation, info) in _parameters(verb).items()
        if name not in (*OUTPUTS, *_READ_BEFORE) and (isinstance(info, typer.models.ArgumentInfo) or "Path" in str(annotation))
    ]


def outputs_of(verb: Callable[..., Any]) -> list[str]:
    """Names of the parameters that say where a verb writes."""
    return [name for name in _parameters(verb) if name in OUTPUTS]


def _parameters(verb: Callable[..., Any]) -> Mapping[str, tuple[Any, Any]]:
    """Type and typer's description of each parameter."""
    found = {}
    for name, parameter in inspect.signature(verb, eval_str=True).parameters.items():
        kind, *described = get_args(parameter.annotation) or (parameter.annotation,)
        found[name] = (kind, described[0] if described else None)
    return found


def _paths(value: Any) -> Iterator[Path]:
    """The paths that a parameter holds: one, several or none."""
    values = value if isinstance(value, list | tuple) else [value]
    yield from (Path(each) for each in values if isinstance(each, str | Path) and str(each) != "-")
