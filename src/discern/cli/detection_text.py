"""Detections on a terminal: the text with colored tokens, or a table of tokens where colors are not available."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from discern.cli.console import Console
from discern.wording import counted

if TYPE_CHECKING:
    from discern.inference.detection import Detection

# Background of a token at probability 0, 1/2 and 1; black text is legible on all of them. They are strong enough that a
# terminal of sixteen colors shows green, yellow and red.
_COLORS = ((110, 225, 110), (250, 220, 40), (255, 85, 70))
_MOST_SUSPICIOUS = 5


class Shown:
    """Prints detections one by one; `finish` prints the legend."""

    def __init__(self, console: Console) -> None:
        terminal = RichConsole()
        self._console = console
        self._colored = terminal.is_terminal and terminal.color_system is not None and not terminal.no_color
        self._count = 0

    def add(self, detection: Detection, threshold: float) -> None:
        """Print a text with its tokens, and the number of marked tokens."""
        if self._count:
            self._console.print("")
        self._count += 1
        if not detection.tokens:
            self._console.print("(empty)")
            return
        self._console.print(colored_text(detection, threshold) if self._colored else token_table(detection, threshold))
        self._console.print(verdict(detection, threshold))

    def finish(self) -> None:
        """Print the legend after the last text."""
        if self._colored and self._count:
            self._console.print(legend())


def show(console: Console, found: Sequence[Detection], threshold: float) -> None:
    """Print texts with colored tokens, or as tables where colors are not available."""
    shown = Shown(console)
    for detection in found:
        shown.add(detection, threshold)
    shown.finish()


def colored_text(detection: Detection, threshold: float) -> Text:
    """The text with the color of its probability behind each token; marked tokens are underlined."""
    text = Text(detection.text)
    for (start, end), probability in zip(detection.offsets, detection.replaced_probability, strict=True):
        text.stylize(_style(probability) + (" underline" if probability >= threshold else ""), start, end)
    return text


def token_table(detection: Detection, threshold: float) -> RenderableType:
    """One line per token: its probability, a mark if it reaches the threshold, the token, and its position."""
    table = Table("replaced", "", "token", "characters")
    table.columns[0].justify = "right"
    for index, ((start, end), probability) in enumerate(zip(detection.offsets, detection.replaced_probability, strict=True)):
        token = _token(detection, index)
        table.add_row(f"{probability:.3f}", "*" if probability >= threshold else "", Text(token), f"{start}-{end}")
    return table


def verdict(detection: Detection, threshold: float) -> Text:
    """The number of tokens that look replaced, and the most suspicious words, each with its highest probability."""
    probabilities = detection.replaced_probability
    ranked = sorted(range(len(detection.tokens)), key=lambda index: -probabilities[index])
    marked = [index for index in ranked if probabilities[index] >= threshold]
    words: dict[tuple[int, int], str] = {}  # by position; the most suspicious token of a word comes first
    for index in marked or ranked[:1]:
        span, name = _word(detection, index)
        words.setdefault(span, f"{name!r} {probabilities[index]:.2f}")
    named = ", ".join(list(words.values())[:_MOST_SUSPICIOUS])
    if not marked:
        return Text(f"no token reaches {threshold:.3g}; the highest: {named}")
    more = f" and {len(words) - _MOST_SUSPICIOUS} more" if len(words) > _MOST_SUSPICIOUS else ""
    look = "looks" if len(marked) == 1 else "look"
    return Text(
        f"{len(marked)} of {counted(len(detection.tokens), 'token')} {look} replaced (threshold {threshold:.3g}): {named}{more}"
    )


def legend() -> Text:
    """The legend: colors of probabilities from 0 to 1, in fewer than 80 columns."""
    steps = [index / 5 for index in range(6)]
    return Text.assemble(
        "probability of being replaced: ", *((f" {step:g} ", _style(step)) for step in steps), "  underlined: marked"
    )


def _word(detection: Detection, index: int) -> tuple[tuple[int, int], str]:
    """The position of a token's word in the text, and the word as it is written there; the token itself if it is in no word."""
    from discern.inference.texts import overlapping, words_of

    words = words_of(detection.text)
    whole = [words[number] for number in overlapping(words, detection.offsets[index])]
    if not whole:
        return detection.offsets[index], _token(detection, index)
    start, end = whole[0][0], whole[-1][1]
    return (start, end), detection.text[start:end]


def _token(detection: Detection, index: int) -> str:
    """A token as it is written in the text; as in the vocabulary if it is a part of a word of WordPiece, or of a character."""
    token, (start, end), offsets = detection.tokens[index], detection.offsets[index], detection.offsets
    text = detection.text[start:end].strip()
    part = (start, end) in (*offsets[max(0, index - 1) : index], *offsets[index + 1 : index + 2])
    return token if part or token.startswith("##") or not text else text


def _style(probability: float) -> str:
    """Black on green at 0, on yellow at 1/2, on red at 1."""
    low, high = (_COLORS[0], _COLORS[1]) if probability < 0.5 else (_COLORS[1], _COLORS[2])
    part = probability * 2 if probability < 0.5 else probability * 2 - 1
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return f"black on #{red:02x}{green:02x}{blue:02x}"
