"""Requests to stop that arrive as signals; the loop handles them between two steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from discern.progress import Progress

if TYPE_CHECKING:
    from discern.training.distributed import Ranks

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that ask a run to save and stop."""

SIGPIPE = 13
"""Signal for a closed progress pipe; Windows has no such signal, so its number is written out."""


class StopRequest:
    """The signal that asked the run to stop, if any."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.signal is not None


_open: list[StopRequest] = []


def ask_to_stop(number: int) -> bool:
    """Ask the training in this process to stop, as if by this signal. Return False if no training is in progress."""
    if not _open:
        return False
    _open[-1].signal = number
    return True


def agree_to_stop(request: StopRequest, ranks: Ranks) -> bool:
    """Whether any rank was asked to stop. All ranks then stop by the same signal."""
    asked = [number for number in ranks.gather(request.signal) if number is not None]
    if asked and request.signal is None:
        request.signal = asked[0]
    return bool(asked)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Treat SIGINT, SIGTERM and SIGHUP as requests to stop; a second SIGINT interrupts at once. Handlers are restored afterwards.

    A signal that is ignored, as SIGHUP under nohup, stays ignored. Outside the main thread, where Python allows no handlers,
    signals are left alone.
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
    """The signals of `STOPPING` that this thread can handle and that are not ignored, as SIGHUP is under nohup."""
    if threading.current_thread() is not threading.main_thread():
        return []
    ignored = [number for number in STOPPING if number != signal.SIGINT and signal.getsignal(number) == signal.SIG_IGN]
    return [number for number in STOPPING if number not in ignored]


def leave_if_stopped(stop: StopRequest, step: int, progress: Progress, *, complete: bool = False) -> None:
    """Exit with the code of the signal, after everything is saved.

    Args:
        complete: whether nothing is left to do, as the signal came during the last evaluation.

    Raises:
        KeyboardInterrupt, SystemExit(128 + signal): a stop was requested.
    """
    if stop.requested:
        left = "the run is complete" if complete else "run the same command to continue"
        said = f"stopped and saved at step {step:,}; {left}"
        progress.note(said)
        if stop.signal == signal.SIGINT:
            raise KeyboardInterrupt(said)
        raise SystemExit(128 + (stop.signal or 0))
