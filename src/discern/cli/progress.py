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
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from typing import IO, Any

from rich import filesize
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
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


def progress_on(console: Console) -> ProgressBar | ProgressLines:
    """A listener that suits the output of the console."""
    return ProgressBar(console) if console.is_terminal and not console.is_dumb_terminal else ProgressLines(console)


class ProgressBar:
    """A progress bar with count, remaining time and the latest metrics. It is removed after a brief stage."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._began = 0.0
        self._live: RichProgress | None = None
        self._metrics: dict[str, str] = {}

    @property
    def is_shown(self) -> bool:
        """Whether the bar is on the terminal now."""
        return self._live is not None

    def start(self, description: str, total: float | None, unit: str) -> None:
        self.finish()
        self._began = self._clock()
        self._metrics = {}
        columns: list[ProgressColumn] = [
            _Description(table_column=Column(ratio=None)),
            SpinnerColumn("line", finished_text="-") if total is None else BarColumn(bar_width=_bar_width(self._console.width)),
            _Amount(table_column=_one_line()),
            _TimeLeft(table_column=_one_line()),
            _Metrics(table_column=Column(ratio=1)),
        ]
        self._live = RichProgress(*columns, console=self._console, refresh_per_second=4, expand=True)
        self._live.start()
        self._live.add_task(description, total=total, unit=unit, open_ended=total is None, metrics=())

    def advance(self, amount: float, **metrics: str) -> None:
        if self._live is None:
            return
        self._metrics |= metrics
        task = self._live.task_ids[0]
        self._live.update(task, advance=amount, metrics=tuple(_word(*each) for each in self._metrics.items()))

    def note(self, message: str) -> None:
        self._console.print(Text(printable(message)))  # breaks between words

    def finish(self) -> None:
        if self._live is not None:
            task = self._live.tasks[0]
            if task.total is None:  # stop the animation of a stage of unknown length
                self._live.update(task.id, total=task.completed)
            self._live.live.transient = self._clock() - self._began < _BRIEF
            self._live.stop()
            self._live = None


def _one_line() -> Column:
    """A column that is never wrapped."""
    return Column(no_wrap=True)


def _bar_width(width: int) -> int:
    return 24 if width >= 100 else 12 if width >= 70 else 6


class _Fitting:
    """As many of the first texts as fit on a line; none of them is cut."""

    def __init__(self, parts: Sequence[str], between: str, style: str = "") -> None:
        self._parts, self._between, self._style = parts, between, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        shown = list(self._parts)
        while len(shown) > 1 and cell_len(self._between.join(shown)) > options.max_width:
            shown.pop()
        yield Text(self._between.join(shown), style=self._style, no_wrap=True, overflow="crop")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        least = cell_len(self._parts[0]) if self._parts else 0
        return Measurement(least, cell_len(self._between.join(self._parts)))


class _Description(ProgressColumn):
    """Description of the stage, or its first words on a narrow terminal."""

    def render(self, task: Task) -> _Fitting:
        return _Fitting(task.description.split(), " ")


class _Metrics(ProgressColumn):
    """The latest metrics, as many as fit on the line."""

    def render(self, task: Task) -> _Fitting:
        return _Fitting(task.fields["metrics"], "  ", "dim")


class _Amount(ProgressColumn):
    """The amount done and the total: "120/1,000 steps"."""

    def render(self, task: Task) -> Text:
        return Text(_amount(task.completed, None if task.fields["open_ended"] else task.total, task.fields["unit"]))


class _TimeLeft(ProgressColumn):
    """The remaining time, or the elapsed time once the stage is finished."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if task.finished or task.total is None:
            return Text(duration(task.finished_time or task.elapsed or 0), style="cyan")
        return Text("-:-- left" if task.time_remaining is None else f"{duration(task.time_remaining)} left", style="cyan")


class ProgressLines:
    """Prints a line at the beginning of a stage, at growing intervals, and at the end of a stage that took a while."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._stage: _Stage | None = None

    def start(self, description: str, total: float | None, unit: str) -> None:
        self.finish()
        self._stage = _Stage(description, total, unit, self._clock())
        self.note(description + (f": {_amount(total, None, unit)}" if total and unit != SHARE else ""))

    def advance(self, amount: float, **metrics: str) -> None:
        if self._stage is None:
            return
        now = self._clock()
        self._stage.advance(amount, metrics, now)
        if now >= self._stage.next_line:
            self.note(self._stage.line(now))
            self._stage.next_line = now + min(300.0, max(FIRST_LINE_AFTER, (now - self._stage.began) / 20))

    def note(self, message: str) -> None:
        self._console.print(Text(printable(message)), soft_wrap=True)

    def finish(self) -> None:
        if self._stage is not None and self._clock() - self._stage.began > _BRIEF:
            self.note(self._stage.last_line(self._clock()))
        self._stage = None


class _Stage:
    """The state of a stage. The rate is measured from the first advance, which may be the work of an earlier run."""

    def __init__(self, description: str, total: float | None, unit: str, now: float) -> None:
        self.description, self.total, self.unit, self.began = description, total, unit, now
        self.next_line = now + FIRST_LINE_AFTER
        self.done = 0.0
        self._metrics: dict[str, str] = {}
        self._first: tuple[float, float] | None = None

    def advance(self, amount: float, metrics: dict[str, str], now: float) -> None:
        self.done += amount
        self._metrics |= metrics
        self._first = self._first or (now, self.done)

    def line(self, now: float) -> str:
        parts = [f"{self.description}: {_amount(self.done, self.total, self.unit)}"]
        if self.total and self.unit != SHARE:
            parts.append(f"{100 * self.done / self.total:.0f}%")
        started, base = self._first or (now, self.done)
        if self.total and self.done > base and now > started:
            parts.append(f"{duration((self.total - self.done) * (now - started) / (self.done - base))} left")
        return "  ".join([*parts, *([_worded(self._metrics)] if self._metrics else [])])

    def last_line(self, now: float) -> str:
        amount = _amount(self.done, self.total, self.unit)
        parts = [f"{self.description}:{f' {amount}' if amount else ''} in {duration(now - self.began)}"]
        return "  ".join([*parts, *([_worded(self._metrics)] if self._metrics else [])])


def _amount(done: float, total: float | None, unit: str) -> str:
    """ "120/1,000 steps", "3.1 MB of 4.0 MB", "12%"; "" if nothing is counted."""
    if unit == SHARE:
        return f"{100 * done:.0f}%"
    if not unit:
        return ""
    if unit == "bytes":
        return _quantity(done, unit) + (f" of {_quantity(total, unit)}" if total else "")
    return _quantity(done, unit) + (f"/{_quantity(total, unit)}" if total else "") + f" {unit}"


def _quantity(value: float, unit: str) -> str:
    if unit == "bytes":
        return filesize.decimal(round(value))
    return f"{value:,.0f}" if value == round(value) or value >= 100 else f"{value:,.1f}"


def _worded(metrics: dict[str, str]) -> str:
    """ "loss 8.21  tokens/s 12k"."""
    return "  ".join(_word(*each) for each in metrics.items())


def _word(name: str, value: str) -> str:
    return f"{name.replace('_', ' ')} {value}"


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
