"""Text for terminals: control characters are escaped, so that the text shown cannot control the terminal.

Labels, column names, members of archives, names of files and the text itself come from elsewhere. Printed as they are, an
escape sequence in one of them could clear the screen, change its title or recolor what follows, a carriage return could
overwrite a message, and a bidirectional override could make it read as another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Span, Text

# C0 without tab and newline, DEL, and C1, which begins escape sequences in 8-bit terminals.
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f"
# Line and paragraph separator; embeddings, overrides and isolates of bidirectional text. The marks U+200E and U+200F, which
# ordinary Arabic and Hebrew use, change the order of neighbors only and stay.
_ORDER = "\u2028\u2029\u202a-\u202e\u2066-\u2069"
_SURROGATES = "\ud800-\udfff"
_CONTROL = re.compile(f"[{_CONTROLS}{_SURROGATES}]")
_UNPRINTABLE = re.compile(f"[{_CONTROLS}{_ORDER}{_SURROGATES}]")
# JSON itself escapes C0; what is left is legal in JSON, and not what a terminal should get.
_UNPRINTABLE_IN_JSON = re.compile(f"[\x7f-\x9f{_ORDER}{_SURROGATES}]")


def printable(text: str) -> str:
    r"""`text` with its control characters spelled out: `\x1b`, `\u202e`; tabs and line ends stay.

    A byte of a file name that is not UTF-8, which Python holds as a surrogate, becomes the byte: `\xff`.
    """
    return _UNPRINTABLE.sub(_spelled, text)


def one_line(text: str) -> str:
    """Data for other programs: as `printable`, but what only decides how text is laid out stays as it is."""
    return _CONTROL.sub(_spelled, text)


def json_text(text: str) -> str:
    """JSON of the same value whose strings hold nothing that a terminal would obey."""
    return _UNPRINTABLE_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class Terminal(Console):
    """A console of rich that shows no text but by way of `printable`, wherever in a table or a progress bar it stands."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        return super().render(_printable_text(renderable) if isinstance(renderable, Text) else renderable, options)

    def render_str(self, text: str, **options: Any) -> Text:
        # Before a `Text` is made of it: that drops some control characters without a trace.
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        """A closed pipe is left to the verb; rich would end the process, and the training with it.

        Raises:
            BrokenPipeError: always.
        """
        raise BrokenPipeError


def _printable_text(text: Text) -> Text:
    """As `printable`, the styles staying where they are."""
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
    if 0xDC80 <= number <= 0xDCFF:  # how Python holds a byte that is not UTF-8
        number -= 0xDC00
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
