"""Checks before any work that a verb does not overwrite its inputs, using the parameters of the verb."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, get_args

import typer

from discern.cli.console import print_error
from discern.errors import ConfigError
from discern.storage.guard import check_apart

OUTPUTS = {"out": "--out", "html": "--html", "submission": "--submission"}
"""Parameters that name outputs. All other paths are inputs."""

OWN = ("report.html",)
"""Outputs that belong inside the folder that they describe."""

# Read completely before anything is written, so it may be inside the output folder, such as the config.toml of a run.
_READ_BEFORE = ("config", "tokenizer")


def guarded(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb, preceded by a check that no output is an input, contains one, or lies inside a data set, a run or a model."""

    @wraps(verb)
    def checked(**values: Any) -> Any:
        reads = [path for name in inputs_of(verb) for path in _paths(values.get(name))]
        try:
            for name, option in OUTPUTS.items():
                for out in _paths(values.get(name)):
                    check_apart(option, out, *reads, own=OWN)
        except ConfigError as error:
            print_error(error.message, error.hint)
            raise SystemExit(error.exit_code) from None
        return verb(**values)

    return checked


def inputs_of(verb: Callable[..., Any]) -> list[str]:
    """Names of the parameters that are input paths: arguments, and options with paths."""
    return [
        name
        for name, (annotation, info) in _parameters(verb).items()
        if name not in (*OUTPUTS, *_READ_BEFORE) and (isinstance(info, typer.models.ArgumentInfo) or "Path" in str(annotation))
    ]


def outputs_of(verb: Callable[..., Any]) -> list[str]:
    """Names of the parameters that are output paths."""
    return [name for name in _parameters(verb) if name in OUTPUTS]


def _parameters(verb: Callable[..., Any]) -> Mapping[str, tuple[Any, Any]]:
    """Type of each parameter, and its description by typer."""
    found = {}
    for name, parameter in inspect.signature(verb, eval_str=True).parameters.items():
        kind, *described = get_args(parameter.annotation) or (parameter.annotation,)
        found[name] = (kind, described[0] if described else None)
    return found


def _paths(value: Any) -> Iterator[Path]:
    """The paths in the value of a parameter."""
    values = value if isinstance(value, list | tuple) else [value]
    yield from (Path(each) for each in values if isinstance(each, str | Path) and str(each) != "-")
