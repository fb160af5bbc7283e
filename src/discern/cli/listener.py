"""Progress for a reader that may disappear: a closed pipe (`2>&1 | head -2`), a closed terminal, a full disk."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Callable

from discern.progress import Progress, Silent
from discern.training.interrupt import SIGPIPE, ask_to_stop


class Listener:
    """Passes progress on while somebody reads it.

    When the reader of stderr goes away, training is asked to save and stop; other work ends with 141, the exit code of SIGPIPE.
    A line that cannot be written for another reason, because the terminal was closed after `disown` or the disk of the log is
    full, is dropped: it must not end the work.
    """

    def __init__(self, inner: Progress) -> None:
        self._inner = inner
        self._piped = _is_pipe(sys.stderr)

    def start(self, description: str, total: float | None, unit: str) -> None:
        self._tell(lambda: self._inner.start(description, total, unit))

    def advance(self, amount: float, **figures: str) -> None:
        # Lines are minutes apart; the reader's absence is noticed with the next step instead.
        if self._piped and nobody_reads(2):
            self._lost()
        self._tell(lambda: self._inner.advance(amount, **figures))

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
            raise SystemExit(128 + SIGPIPE)


def nobody_reads(stream: int) -> bool:
    """Whether a file descriptor is that of a pipe whose reader is gone."""
    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(stream, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def drop_unread() -> bool:
    """Let what is still printed on stdout and stderr go nowhere where nobody reads it; whether that is so of one of them."""
    broken = [stream for stream in (1, 2) if nobody_reads(stream)]
    for stream in broken:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream)
        os.close(nowhere)
    return bool(broken)


def _is_pipe(stream: object) -> bool:
    """Whether it is stderr itself, not what tests put in its place, and a pipe or socket."""
    try:
        mode = os.fstat(2).st_mode
        return stream.fileno() == 2 and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode))  # type: ignore[attr-defined]
    except (OSError, ValueError, AttributeError):
        return False
