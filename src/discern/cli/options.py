"""Options that several verbs share: where the configuration of a run comes from."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from discern.cli.console import Console
from discern.config.presets import preset_names
from discern.errors import ConfigError
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


def typed_text(text: str, name: str) -> str:
    """A text from the command line, which a shell hands over as bytes.

    Args:
        name: of the argument, for the message.

    Raises:
        ConfigError: it is not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        byte = os.fsencode(text[problem.start])[0] if 0xDC80 <= ord(text[problem.start]) <= 0xDCFF else 0
        raise ConfigError(
            f"{name} is not UTF-8: byte 0x{byte:02x} at character {problem.start + 1}",
            hint="if the terminal uses another encoding, save the text to a file and convert it with iconv",
        ) from problem
    return text


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
