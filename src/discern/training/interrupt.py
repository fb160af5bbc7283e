"""A request to stop, which the loop honours between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from discern.training.parallel import Ranks

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals that ask a run to save and stop."""

SIGPIPE = 13
"""Signal for a closed progress pipe; Windows has no such signal, so its number is written out."""


class StopRequest:
    """Whether somebody asked for the run to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def requested(self) -> bool:
        """True once a signal has come."""
        return self.signal is not None


_open: list[StopRequest] = []


def ask_to_stop(number: int) -> bool:
    """Ask the training that runs in this process to stop, as a signal of this number would; False where none does."""
    if not _open:
        return False
    _open[-1].signal = number
    return True


def agree_to_stop(request: StopRequest, ranks: Ranks) -> bool:
    """Whether any rank was asked to stop; all ranks then take it as asked of themselves, by the same signal."""
    asked = [number for number in ranks.gather(request.signal) if number is not None]
    if asked and request.signal is None:
        request.signal = asked[0]
    return bool(asked)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """SIGINT, SIGTERM and SIGHUP ask for a stop; a second SIGINT interrupts at once. The handlers from before come back.

    SIGHUP stays ignored where it is, as under nohup. Outside the main thread, where Python allows no handlers, signals are left
    to whoever has the main thread.
    """
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        if request.signal == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal = number

    before = {number: signal.signal(number, note) for number in handled()}
    _open.append(request)
    try:
        yield request
    finally:
        _open.remove(request)
        for number, handler in before.items():
            signal.signal(number, handler)


def handled() -> list[int]:
    """The signals of `STOPPING` that this thread may handle and that the user has not had ignored, as nohup does."""
    if threading.current_thread() is not threading.main_thread():
        return []
    ignored = [number for number in STOPPING if number != signal.SIGINT and signal.getsignal(number) == signal.SIG_IGN]
    return [number for number in STOPPING if number not in ignored]
