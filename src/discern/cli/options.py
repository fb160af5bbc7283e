"""Options that several verbs share: where the configuration of a run comes from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from discern.cli.console import Console
from discern.config.presets import preset_names
from discern.training.place import place


def _presets(incomplete: str) -> list[str]:
    """For the shell's completion."""
    return [name for name in preset_names() if name.startswith(incomplete)]


ConfigArgument: TypeAlias = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG.toml", help="Settings, over the preset; or the folder of a run.", show_default=False),
]
PresetOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--preset", metavar="NAME", help="Recipe to start from; 'discern config presets' lists them.", autocompletion=_presets
    ),
]
SetOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Set one value, over preset and file; may be repeated.", show_default=False
    ),
]
ScorerOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--scorer",
        metavar="NAME",
        help="electric, rtd, pll, pll-word-l2r, two-tower, inversion or permutation-lm; without it what the model is decides.",
        show_default=False,
    ),
]


def launch_ranks(nproc: int, console: Console) -> None:
    """Start the processes that `--nproc` asks for and leave with their exit code, unless this already is one of several.

    Raises:
        RanksError: one of them was killed, or does not answer.
    """
    if nproc == 1 or place().world > 1:
        return
    from discern.training.launch import launch

    raise SystemExit(launch(without_nproc(sys.argv[1:]), nproc, console.warn))


def without_nproc(arguments: list[str]) -> list[str]:
    """The command line that each of the processes is started with."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip or argument.startswith("--nproc="):
            skip = False
        elif argument == "--nproc":
            skip = True
        else:
            kept.append(argument)
    return kept
