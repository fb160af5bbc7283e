"""Output for terminals: control characters are escaped, and tables fit the width.

Labels, column names, file names and text come from untrusted files. Printed unescaped, an escape sequence in one of them could
clear the screen, change its title or recolor what follows, a carriage return could overwrite a message, and a bidirectional
override could change how it reads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from copy import copy
from typing import IO, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Span, Text

# C0 without tab and newline, DEL, and C1, which starts escape sequences in 8-bit terminals.
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f"
# Line and paragraph separator; embeddings, overrides and isolates of bidirectional text. The marks U+200E and U+200F, which
# ordinary Arabic and Hebrew use, change the order of neighbors only and stay.
_ORDER = "\u2028\u2029\u202a-\u202e\u2066-\u2069"
_SURROGATES = "\ud800-\udfff"
_CONTROL = re.compile(f"[{_CONTROLS}{_SURROGATES}]")
_UNPRINTABLE = re.compile(f"[{_CONTROLS}{_ORDER}{_SURROGATES}]")
# JSON itself escapes C0. The other characters are legal in JSON but must not reach a terminal.
_UNPRINTABLE_IN_JSON = re.compile(f"[\x7f-\x9f{_ORDER}{_SURROGATES}]")


def printable(text: str) -> str:
    r"""`text` with control characters escaped (`\x1b`, `\u202e`). Tabs and line ends stay.

    A byte of a file name that is not UTF-8, which Python represents by a surrogate, is shown as the byte: `\xff`.
    """
    return _UNPRINTABLE.sub(_spelled, text)


def one_line(text: str) -> str:
    """`text` for other programs: like `printable`, but characters that only affect the layout of text are kept."""
    return _CONTROL.sub(_spelled, text)


def json_text(text: str) -> str:
    """Equivalent JSON whose strings contain no control characters."""
    return _UNPRINTABLE_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def same_terminal(first: IO[str], second: IO[str]) -> bool:
    """Whether two streams write to the same terminal."""
    try:
        # rich takes a pipe or a file for a terminal if the environment says so (FORCE_COLOR).
        terminals = first.isatty() and second.isatty()
        return terminals and os.fstat(first.fileno()).st_rdev == os.fstat(second.fileno()).st_rdev
    except (OSError, ValueError):  # not a file
        return False


class Terminal(Console):
    """A console of rich that escapes all text with `printable`, also in tables and progress bars."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        return super().render(_printable_text(renderable) if isinstance(renderable, Text) else renderable, options)

    def render_str(self, text: str, **options: Any) -> Text:
        # Before rich makes a `Text` of it, which silently drops some control characters.
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        """Leave a closed pipe to the verb. By default rich ends the process, and the training with it.

        Raises:
            BrokenPipeError: always.
        """
        raise BrokenPipeError


def _printable_text(text: Text) -> Text:
    """`printable` for styled text; styles keep their places."""
    plain = text.plain
    if _UNPRINTABLE.search(plain) is None:
        return text
    pieces = [printable(character) for character in plain]
    places = [0]
    for piece in pieces:
        places.append(places[-1] + len(piece))
    made = text.blank_copy("".join(pieces))
    made.spans = [Span(places[min(s.start, len(plain))], places[min(s.end, len(plain))], s.style) for s in text.spans]
    return made


def _spelled(found: re.Match[str]) -> str:
    number = ord(found[0])
    if 0xDC80 <= number <= 0xDCFF:  # how Python represents a byte that is not UTF-8
        number -= 0xDC00
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"


_PADDING = 3  # a space on either side of a cell, and a line


def fitting(table: Table, width: int) -> list[Table]:
    """The table, split into several with the same first column if it is too wide. Words and numbers are never broken.

    Args:
        width: width of the terminal in columns.
    """
    needs = [_need(column) for column in table.columns]
    if needs:  # names of rows are kept on one line if they are short
        longest = max((cell_len(_plain(cell)) for cell in table.columns[0].cells), default=0)
        needs[0] = max(needs[0], longest) if longest <= width // 3 else needs[0]
    first, rest = list(range(len(needs)))[:1], list(range(len(needs)))[1:]
    parts: list[list[int]] = []
    for place in rest:
        if parts and _width(needs[each] for each in (*first, *parts[-1], place)) <= width:
            parts[-1].append(place)
        else:
            parts.append([place])
    return [_part(table, [*first, *part], needs, width) for part in parts or [[]]]


def _need(column: Column) -> int:
    """The smallest width at which no word of a column is broken."""
    texts = [column.header, *column.cells]
    words = (word for text in texts for word in _plain(text).split())
    return max(map(cell_len, words), default=0)


def _plain(text: object) -> str:
    return text.plain if isinstance(text, Text) else str(text)


def _width(needs: Iterable[int]) -> int:
    return sum(need + _PADDING for need in needs) + 1


def _part(table: Table, places: list[int], needs: list[int], width: int) -> Table:
    """Some columns of a table, each as wide as it needs. The remaining width goes to columns that would be folded."""
    part = copy(table)
    part.columns = []
    left = width - _width(needs[place] for place in places)
    for index, place in enumerate(places):
        column = copy(table.columns[place])
        whole = max(cell_len(_plain(text)) for text in (column.header, *column.cells))
        more = max(0, min(whole - needs[place], left))
        left -= more
        # Fixed, because the library would shrink all columns alike.
        column._index, column.width, column.overflow = index, needs[place] + more, "fold"
        part.columns.append(column)
    return part
