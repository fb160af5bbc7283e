"""Output for terminals: control characters are escaped, and tables fit the width.

Labels, column names, file names and text come from untrusted files. Printed unescaped, an escape sequence in one of them could
clear the screen, change its title or recolor what follows, a carriage return could overwrite a message, and a bidirectional
override could change how it reads.
"""

from __future__ import annotations

import os
import re
import select
import stat
import sys
import time
from collections.abc import Callable, Iterable
from copy import copy
from typing import IO, Any

from rich import filesize
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task
from rich.progress import Progress as RichProgress
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Span, Text

from discern.progress import SHARE, Progress, Silent, duration
from discern.training.interrupt import SIGPIPE, ask_to_stop

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


FIRST_LINE_AFTER = 10.0
"""Seconds until the first line. The interval then grows with the elapsed time, up to 5 minutes."""

READER_GONE = 128 + SIGPIPE
"""Exit code of a command whose output nobody reads any more."""

_BRIEF = 2.0
"""Seconds below which a stage leaves no bar and no closing line."""


class Display:
    """Shows progress on a console: a bar on a terminal, elsewhere lines at growing intervals.

    A brief stage leaves neither a bar nor a closing line.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._has_bar = console.is_terminal and not console.is_dumb_terminal
        self._stage: RichProgress | None = None
        self._next_line = 0.0

    @property
    def shows_bar(self) -> bool:
        """Whether a bar is on the terminal now."""
        return self._has_bar and self._stage is not None

    def start(self, description: str, total: float | None, unit: str) -> None:
        self.finish()
        self._stage = RichProgress(
            _TextOf(lambda task: task.description, Column()),
            SpinnerColumn("line", finished_text="-") if total is None else BarColumn(max(6, self._console.width // 4 - 4)),
            _TextOf(_amount, Column(no_wrap=True)),
            _TextOf(_time, Column(no_wrap=True)),
            _TextOf(_metrics, Column(ratio=1)),
            console=self._console,
            refresh_per_second=4,
            speed_estimate_period=600.0,  # seconds; a step may take minutes
            get_time=self._clock,
            disable=not self._has_bar,
            expand=True,
        )
        self._stage.start()
        self._stage.add_task(description, total=total, of=total, unit=unit, metrics={})
        self._next_line = self._clock() + FIRST_LINE_AFTER
        if not self._has_bar:
            self.note(f"{description}: {_counted(unit, total)}" if total and unit != SHARE else description)

    def advance(self, amount: float, **metrics: str) -> None:
        if self._stage is None:
            return
        task = self._stage.tasks[0]
        self._stage.update(task.id, advance=amount, metrics=task.fields["metrics"] | metrics)
        if not self._has_bar and self._clock() >= self._next_line:
            share = f"{task.percentage:.0f}%" if task.total and task.fields["unit"] != SHARE else ""
            left = _time(task) if task.time_remaining is not None else ""
            self.note("  ".join(filter(None, [f"{task.description}: {_amount(task)}", share, left, _metrics(task)])))
            self._next_line = self._clock() + min(300.0, max(FIRST_LINE_AFTER, (task.elapsed or 0.0) / 20))

    def note(self, message: str) -> None:
        self._console.print(Text(printable(message)), soft_wrap=not self._has_bar)  # a terminal breaks between words

    def finish(self) -> None:
        if self._stage is None:
            return
        stage, task, self._stage = self._stage, self._stage.tasks[0], None
        brief = (task.elapsed or 0.0) < _BRIEF
        if self._has_bar:
            if task.total is None:  # ends the animation
                stage.update(task.id, total=task.completed)
            stage.live.transient = brief
            stage.stop()
        elif not brief:
            ended = " ".join(filter(None, [f"{task.description}:", _amount(task), f"in {duration(task.elapsed or 0.0)}"]))
            self.note("  ".join(filter(None, [ended, _metrics(task)])))


class _TextOf(ProgressColumn):
    """A column of text about a task. On a narrow terminal, the columns without `no_wrap` are cut."""

    def __init__(self, text: Callable[[Task], str], column: Column) -> None:
        super().__init__(column)
        self._text = text

    def render(self, task: Task) -> Text:
        return Text(self._text(task), no_wrap=True, overflow="ellipsis")


def _amount(task: Task) -> str:
    return _counted(task.fields["unit"], task.completed, task.fields["of"])


def _counted(unit: str, *amounts: float | None) -> str:
    """ "120/1,000 steps", "3.1 MB of 4.0 MB", "12%"; "" if nothing is counted."""
    known = [amount for amount in amounts if amount is not None]
    if unit == SHARE:
        return f"{100 * known[0]:.0f}%"
    if unit == "bytes":
        return " of ".join(filesize.decimal(round(amount)) for amount in known)
    numbers = (f"{amount:,.0f}" if amount == round(amount) or amount >= 100 else f"{amount:,.1f}" for amount in known)
    return unit and f"{'/'.join(numbers)} {unit}"


def _time(task: Task) -> str:
    """The remaining time, or the elapsed time once the stage is finished."""
    if task.finished or task.total is None:
        return duration(task.elapsed or 0.0)
    return "-:-- left" if task.time_remaining is None else f"{duration(task.time_remaining)} left"


def _metrics(task: Task) -> str:
    """ "loss 8.21  tokens/s 12k"."""
    return "  ".join(f"{name.replace('_', ' ')} {value}" for name, value in task.fields["metrics"].items())


class Listener:
    """Passes progress on as long as there is a reader.

    The reader may disappear: a closed pipe (`2>&1 | head -2`), a closed terminal, a full disk. If the pipe of stderr is closed,
    training is asked to save and stop, and other work ends with 141, the exit code of SIGPIPE. A line that cannot be written
    for another reason (the terminal was closed after `disown`, or the disk of the log is full) is dropped, because it must not
    end the work.
    """

    def __init__(self, inner: Progress) -> None:
        self._inner = inner
        self._piped = _is_pipe(sys.stderr)

    def start(self, description: str, total: float | None, unit: str) -> None:
        self._tell(lambda: self._inner.start(description, total, unit))

    def advance(self, amount: float, **metrics: str) -> None:
        # Lines are minutes apart, so check at every step whether the reader is still there.
        if self._piped and nobody_reads(2):
            self._lost()
        self._tell(lambda: self._inner.advance(amount, **metrics))

    def note(self, message: str) -> None:
        self._tell(lambda: self._inner.note(message))

    def finish(self) -> None:
        self._tell(self._inner.finish)

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BrokenPipeError:
            self._lost()
        except OSError:
            return

    def _lost(self) -> None:
        self._inner, self._piped = Silent(), False
        drop_unread()
        if not ask_to_stop(SIGPIPE):
            raise SystemExit(READER_GONE)


def nobody_reads(stream: int) -> bool:
    """Whether a file descriptor is a pipe whose reader is gone."""
    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def drop_unread() -> bool:
    """Redirect stdout and stderr to /dev/null if their reader is gone; returns whether one was redirected."""
    broken = [stream for stream in (1, 2) if nobody_reads(stream)]
    for stream in broken:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream)
        os.close(nowhere)
    return bool(broken)


def _is_pipe(stream: object) -> bool:
    """Whether a stream is the real stderr (not a replacement in tests) and a pipe or socket."""
    try:
        mode = os.fstat(2).st_mode
        return stream.fileno() == 2 and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))  # type: ignore[attr-defined]
    except (OSError, ValueError, AttributeError):
        return False
