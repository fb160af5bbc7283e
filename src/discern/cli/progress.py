"""Progress on a terminal or in a log, and text that is safe to print there.

Labels, column names, file names and text come from untrusted files. Printed unescaped, an escape sequence in one of them could
clear the screen, change its title or recolor what follows, a carriage return could overwrite a message, and a bidirectional
override could change how it reads.
"""

from __future__ import annotations

import os
import re
import select
import signal
import stat
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, Progress as RichProgress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from discern.progress import SHARE, Progress, Silent, duration
from discern.training.process import ask_to_stop

# C0 without tab and newline, DEL, and C1, which starts escape sequences in 8-bit terminals; line and paragraph separator;
# embeddings, overrides and isolates of bidirectional text; surrogates. The marks U+200E and U+200F, which ordinary Arabic and
# Hebrew use, change the order of neighbors only and stay.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
READER_GONE = 128 + signal.SIGPIPE
"""Exit code of a command whose output nobody reads any more."""
FIRST_LINE_AFTER = 10.0
"""Seconds until the first line away from a terminal. The interval then grows with the elapsed time, up to 5 minutes."""
_BRIEF = 2.0
"""Seconds below which a stage leaves no bar and no closing line."""


def printable(text: str) -> str:
    r"""`text` with control characters escaped (`\x1b`, `\u202e`). Tabs and line ends stay.

    A byte of a file name that is not UTF-8, which Python represents by a surrogate, is shown as the byte: `\xff`.
    """

    def escaped(found: re.Match[str]) -> str:
        number = ord(found[0])
        number -= 0xDC00 if 0xDC80 <= number <= 0xDCFF else 0
        return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"

    return _UNPRINTABLE.sub(escaped, text)


def json_text(text: str) -> str:
    """Equivalent JSON whose strings contain no control characters; JSON itself escapes only some of them."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class Terminal(Console):
    """A console of rich that leaves a closed pipe to the verb. By default rich ends the process, and the training with it."""

    def __init__(self, *, stderr: bool) -> None:
        super().__init__(stderr=stderr, markup=False, highlight=False, emoji=False)
        if not (self.is_terminal or self.is_jupyter):
            self.width = 10_000  # lines are never wrapped

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError."""
        raise BrokenPipeError


class Display:
    """Shows progress on a console: a bar on a terminal or in a notebook, elsewhere lines at growing intervals.

    A brief stage leaves neither a bar nor a closing line.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._has_bar = console.is_terminal and not console.is_dumb_terminal
        self._stage: RichProgress | None = None
        self._cell: Any = None
        self._next_line = 0.0

    @property
    def shows_bar(self) -> bool:
        return self._has_bar and self._stage is not None

    def start(self, description: str, total: float | None, unit: str) -> None:
        self.finish()
        self._stage = RichProgress(
            TextColumn("{task.description}", markup=False),
            SpinnerColumn("line", finished_text="-") if total is None else BarColumn(max(6, self._console.width // 4 - 4)),
            _State(table_column=Column(ratio=1)),
            console=self._console,
            refresh_per_second=4,
            speed_estimate_period=600.0,  # seconds; a step may take minutes
            get_time=self._clock,
            disable=not self._has_bar,
            expand=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._stage.start()
        self._stage.add_task(printable(description), total=total, of=total, unit=unit, metrics={})
        if self._console.is_jupyter:  # rich's own display needs ipywidgets there
            self._cell = import_module("IPython.display").display(self._stage, display_id=True)
        elif not self._has_bar:
            self._next_line = self._clock() + FIRST_LINE_AFTER
            self.note(f"{description}: {_counted(unit, total)}" if total and unit != SHARE else description)

    def advance(self, amount: float, **metrics: str) -> None:
        if self._stage is None:
            return
        task = self._stage.tasks[0]
        self._stage.update(task.id, advance=amount, metrics=task.fields["metrics"] | metrics)
        if self._has_bar or self._clock() < self._next_line:
            return
        if self._cell:
            self._cell.update(self._stage)
            self._next_line = self._clock() + 0.25
        else:
            left = f"{duration(task.time_remaining)} left" if task.time_remaining is not None else ""
            self.note(_stated(task, left))
            self._next_line = self._clock() + min(300.0, max(FIRST_LINE_AFTER, (task.elapsed or 0.0) / 20))

    def note(self, message: str) -> None:
        text = Text(printable(message))
        if message.startswith("warning: "):
            text.stylize("yellow", 0, len("warning:"))
        self._console.print(text, soft_wrap=not self._has_bar)  # a terminal breaks between words

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
        elif self._cell:
            self._cell.update({"text/html": ""} if brief else stage, raw=brief)
        elif not brief:
            self.note(_stated(task, f"in {duration(task.elapsed or 0.0)}"))


class _State(ProgressColumn):
    """What is done, the remaining time (once finished, the elapsed time), and the metrics. A narrow terminal cuts it."""

    def render(self, task: Task) -> Text:
        elapsed = task.finished or task.total is None
        left = "-:--" if task.time_remaining is None else duration(task.time_remaining)
        text = _stated(task, duration(task.elapsed or 0.0) if elapsed else f"{left} left")
        return Text(printable(text.partition(": ")[2]), no_wrap=True, overflow="ellipsis")


def _stated(task: Task, time: str) -> str:
    """ "pre-training: 120/1,000 steps  0:12 left  loss 8.21  tokens/s 12k"."""
    metrics = (f"{name.replace('_', ' ')} {value}" for name, value in task.fields["metrics"].items())
    amount = _counted(task.fields["unit"], task.completed, task.fields["of"])
    return f"{task.description}: " + "  ".join(filter(None, (amount, time, *metrics)))


def _counted(unit: str, *amounts: float | None) -> str:
    """ "120/1,000 steps", "3.1 MB of 4.0 MB", "12%"; "" if nothing is counted."""
    known = [amount for amount in amounts if amount is not None]
    if unit == SHARE:
        return f"{100 * known[0]:.0f}%"
    if unit == "bytes":
        return " of ".join(filesize.decimal(round(amount)) for amount in known)
    numbers = (f"{amount:,.0f}" if amount == round(amount) or amount >= 100 else f"{amount:,.1f}" for amount in known)
    return unit and f"{'/'.join(numbers)} {unit}"


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
        if not ask_to_stop(signal.SIGPIPE):
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
