"""The process of a training and its surroundings: its rank, by environment variables, and requests to stop, by signals."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from discern.errors import ConfigError
from discern.progress import Progress

if TYPE_CHECKING:
    from discern.training.distributed import Ranks

TIMEOUT_VARIABLE = "DISCERN_RANKS_TIMEOUT"
"""Environment variable: seconds after which a process that does not respond is considered lost."""

HEARTBEAT_VARIABLE = "DISCERN_HEARTBEAT_TIMEOUT"
"""Environment variable: seconds without a sign of life after which a process is considered dead or stopped."""

NPROC_RUN = "discern-nproc-"
"""Beginning of the TORCHELASTIC_RUN_ID of the processes of `--nproc`."""

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Set by torchrun, which may start the processes again so often, and by Slurm after a requeue.
_RESTARTS = ("TORCHELASTIC_MAX_RESTARTS", "SLURM_RESTART_COUNT")

_ALONE = f"unset {' '.join(_NEEDED)}"


@dataclass(frozen=True)
class RankEnvironment:
    """Rank of this process among those that train together.

    Attributes:
        rank: number of this process, from 0.
        world_size: number of processes.
        local_rank: number of this process on this machine, from 0.
        local_world_size: number of processes on this machine.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


SINGLE_PROCESS = RankEnvironment(0, 1, 0, 1)


def rank_environment() -> RankEnvironment:
    """Rank and world size from the environment; a single process if not all of the variables are set.

    RANK or WORLD_SIZE alone are ignored, since on some clusters every process has them.

    Raises:
        ConfigError: the variables contradict each other, or are not numbers.
    """
    if not all(os.environ.get(name) for name in _NEEDED):
        return SINGLE_PROCESS
    world, rank = _number("WORLD_SIZE", 1), _number("RANK", 0)
    if rank >= world:
        raise ConfigError(
            f"the environment has RANK={rank} and WORLD_SIZE={world}: ranks are numbered from 0 to {world - 1}",
            hint=f"start it with torchrun or --nproc, or alone: {_ALONE}",
        )
    local_world, local_rank = _number("LOCAL_WORLD_SIZE", 1), _number("LOCAL_RANK", 0)
    return SINGLE_PROCESS if world == 1 else RankEnvironment(rank, world, local_rank, max(local_world, local_rank + 1))


def require_single_process(what: str) -> None:
    """Check that torchrun has not started several processes for work that needs only one.

    Raises:
        ConfigError: it has started several.
    """
    if rank_environment().world_size > 1:
        raise ConfigError(
            f"{what} runs in one process, but the environment sets up several", hint=f"start it as a single process: {_ALONE}"
        )


def missing_variables() -> list[str]:
    """Variables that are missing if some but not all of them are set; empty otherwise."""
    missing = [name for name in _NEEDED if not os.environ.get(name)]
    return [] if {"RANK", "WORLD_SIZE"} <= set(missing) else missing


def launched_here() -> bool:
    """Whether `--nproc` has started this process."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(NPROC_RUN)


def ranks_timeout() -> float:
    """Seconds that a process waits for the others during a step; 600 unless the environment sets another number.

    Raises:
        ConfigError: the variable is not a number above 0.
    """
    return _seconds(TIMEOUT_VARIABLE, "600")


def heartbeat_timeout() -> float:
    """Seconds without a sign of life after which a process is considered lost; 40 unless the environment sets another number.

    Raises:
        ConfigError: the variable is not a number above 0.
    """
    return _seconds(HEARTBEAT_VARIABLE, "40")


def lock_patience() -> float:
    """Seconds to wait for the lock of a run: 90 if a launcher may have restarted this process, otherwise 0.

    The process before may still be ending, or its machine has died and a network file system keeps the lock until its lease ends.
    """
    return 90.0 if any(os.environ.get(name, "0") != "0" for name in _RESTARTS) else 0.0


def _number(name: str, least: int) -> int:
    value = os.environ.get(name) or str(least)
    if not value.isdecimal() or int(value) < least:
        raise ConfigError(
            f"the environment has {name}={value!r}, expected an integer of at least {least}",
            hint=f"start it with torchrun or --nproc, or alone: {_ALONE}",
        )
    return int(value)


def _seconds(name: str, default: str) -> float:
    value = os.environ.get(name, default)
    with suppress(ValueError):
        if 0 < float(value) < float("inf"):
            return float(value)
    raise ConfigError(f"the environment has {name}={value!r}, expected a number of seconds above 0", hint=f"unset {name}")


STOPPING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
"""Signals that ask a run to save and stop."""


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
