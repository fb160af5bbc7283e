"""`discern detect`: which tokens of a text look replaced."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from discern.cli.console import Console, JsonOption, command
from discern.errors import ConfigError, DataError

if TYPE_CHECKING:
    from discern.scoring.detection import Detection

# Background of a token at probability 0, 1/2 and 1; black on any of them is legible. Strong enough that a terminal of
# sixteen colours shows green, yellow and red for them and for what lies between.
_COLOURS = ((110, 225, 110), (250, 220, 40), (255, 85, 70))
_MOST_SUSPICIOUS = 5


def detect(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run, an export, or any Hugging Face ELECTRA discriminator.")],
    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="TEXT", help="The text to judge; may be repeated.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="A file with one text a line; - is the standard input.", show_default=False),
    ] = None,
    threshold: Annotated[
        float, typer.Option("--threshold", min=0.0, max=1.0, help="Probability from which a token is called replaced.")
    ] = 0.5,
    json_output: JsonOption = False,
) -> None:
    """Print how probable it is that each token of a text was replaced. Without --text or --file, reads the standard input.

    Example: discern detect runs/first --text "The chef ate purple elephants."
    """
    with command(json_output=json_output) as console:
        texts = _texts(text, file)
        if not texts:
            console.warn("there is no line in the input: nothing to judge")
        from discern.workflows.detect import detect as run_detect

        found = run_detect(model, texts, console.progress, console.warn)
        values = [_values(detection) for detection in found]
        if json_output:
            console.result(values[0] if text and len(text) == 1 else {"texts": values}, text="")
        else:
            show(console, found, threshold)


def _values(detection: Detection) -> dict[str, object]:
    return {
        "tokens": detection.tokens,
        "offsets": detection.offsets,
        "replaced_probability": detection.replaced_probability,
    }


def _texts(text: list[str] | None, file: Path | None) -> list[str]:
    """What to judge: the texts given, or the lines of a file."""
    if text and file is not None:
        raise ConfigError("--text and --file are both given", hint="give one of them")
    if text:
        return text
    if file is not None and str(file) != "-":
        try:
            with file.open("rb") as stream:
                return _lines(stream, str(file))
        except OSError as problem:
            raise DataError(f"{file} cannot be read: {problem.strerror}", hint="give a text file") from problem
    if file is None and sys.stdin.isatty():
        raise ConfigError("there is no text to judge", hint='add --text "Some text.", or --file FILE, or pipe a text in')
    return _lines(sys.stdin.buffer, "standard input")


def _lines(stream: Iterable[bytes], name: str) -> list[str]:
    """The lines of a UTF-8 file, without their ends; an empty line is an empty text, so that the numbers stay in step."""
    lines = []
    for number, raw in enumerate(stream, 1):
        try:
            lines.append(raw.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\n").removesuffix("\r"))
        except UnicodeDecodeError as problem:
            raise DataError(f"{name}, line {number}: not UTF-8 ({problem.reason})", hint="convert the file to UTF-8") from problem
    return lines


def show(console: Console, found: list[Detection], threshold: float) -> None:
    """Print the texts with their tokens coloured, or as a table where colours don't show."""
    terminal = RichConsole()
    coloured = terminal.is_terminal and terminal.color_system is not None and not terminal.no_color
    for number, detection in enumerate(found):
        if number:
            console.print("")
        if not detection.tokens:
            console.print("(empty)")
            continue
        console.print(coloured_text(detection) if coloured else token_table(detection, threshold))
        console.print(verdict(detection, threshold))
    if coloured and found:
        console.print(legend())


def coloured_text(detection: Detection) -> Text:
    """The text itself, each token on the colour of its probability."""
    text = Text(detection.text)
    for (start, end), probability in zip(detection.offsets, detection.replaced_probability, strict=True):
        text.stylize(_style(probability), start, end)
    return text


def token_table(detection: Detection, threshold: float) -> RenderableType:
    """One line a token: its probability, a mark from the threshold on, the token, and where it stands."""
    table = Table("replaced", "", "token", "characters")
    table.columns[0].justify = "right"
    for token, (start, end), probability in zip(detection.tokens, detection.offsets, detection.replaced_probability, strict=True):
        table.add_row(f"{probability:.3f}", "*" if probability >= threshold else "", Text(token), f"{start}-{end}")
    return table


def verdict(detection: Detection, threshold: float) -> Text:
    """How many tokens look replaced, and the most suspicious by name."""
    ranked = sorted(range(len(detection.tokens)), key=lambda index: -detection.replaced_probability[index])
    flagged = [index for index in ranked if detection.replaced_probability[index] >= threshold]
    named = ", ".join(
        f"{_surface(detection, index)!r} {detection.replaced_probability[index]:.2f}"
        for index in (flagged or ranked)[: _MOST_SUSPICIOUS if flagged else 1]
    )
    count = len(detection.tokens)
    if not flagged:
        return Text(f"no token of {count} reaches {threshold:g}; the highest: {named}")
    more = f" and {len(flagged) - _MOST_SUSPICIOUS} more" if len(flagged) > _MOST_SUSPICIOUS else ""
    return Text(f"{len(flagged)} of {count} tokens look replaced (from {threshold:g} on): {named}{more}")


def legend() -> Text:
    """The colours from 0 to 1."""
    steps = [index / 10 for index in range(11)]
    return Text.assemble("probability replaced: ", *((f" {step:g} ", _style(step)) for step in steps))


def _surface(detection: Detection, index: int) -> str:
    start, end = detection.offsets[index]
    return detection.text[start:end] or detection.tokens[index]


def _style(probability: float) -> str:
    """Black on green at 0, on yellow at 1/2, on red at 1."""
    low, high = (_COLOURS[0], _COLOURS[1]) if probability < 0.5 else (_COLOURS[1], _COLOURS[2])
    part = probability * 2 if probability < 0.5 else probability * 2 - 1
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return f"black on #{red:02x}{green:02x}{blue:02x}"
