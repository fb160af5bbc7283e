"""Launch several ranks on this machine, like torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from discern.data.processes import available_cores
from discern.errors import RanksError
from discern.training.heartbeat import LOST_KEY
from discern.training.interrupt import handled
from discern.training.rank_environment import LIFELINE, LOST_CONTACT, TIMEOUT_VARIABLE, ranks_timeout

_LOOK = 0.1  # seconds between checks of the processes
# A process that failed has printed why. The others notice, and their last messages should not be cut off.
_LAST_WORDS = 5.0
_GRACE = 20.0  # seconds from SIGTERM to SIGKILL


def launch(
    arguments: Sequence[str], nproc: int, tell: Callable[[str], None], program: Sequence[str] = (sys.executable, "-m", "discern")
) -> int:
    """Run `python -m discern ARGUMENTS` in `nproc` connected processes and return the exit code.

    The processes share stdout and stderr of this one. SIGINT, SIGTERM and SIGHUP are passed on to all of them. When this process
    ends for any reason, even by SIGKILL, they save and stop; when one of them fails, the others stop as well.

    Args:
        tell: called when a process is stopped by a signal, and when it is resumed.
        program: program to run with the arguments.

    Raises:
        RanksError: a process was killed, or stayed stopped for too long.
    """
    # The processes connect to this store. It holds the port from the start, so that no other program can take it in between.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reading, writing = os.pipe()
    ranks: list[_RankProcess] = []
    try:
        with _forwarded() as asked:
            for number in range(nproc):
                ranks.append(_RankProcess(number, nproc, [*program, *arguments], store.port, reading))
            return _supervise(ranks, asked, tell, partial(_reported, store))
    finally:
        for rank in ranks:
            rank.kill()
        os.close(reading)
        os.close(writing)


class _RankProcess:
    """One of the launched processes.

    Attributes:
        code: return code, as in `subprocess`; None while it is running.
        stopped: time at which a signal stopped it; None unless it is stopped.
        sent: whether SIGKILL was sent to it.
    """

    def __init__(self, number: int, nproc: int, line: Sequence[str], port: int, lifeline: int) -> None:
        self.name = f"process {number} of {nproc}"
        self.code: int | None = None
        self.stopped: float | None = None
        self.sent = False
        threads = max(1, available_cores() // nproc)
        environment = {
            "OMP_NUM_THREADS": str(threads),
            **os.environ,
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process has opened the port, so rank 0 need not
            LIFELINE: str(lifeline),
        }
        # In a session of its own: Ctrl-C would otherwise arrive twice, and the second one interrupts saving.
        self._process = subprocess.Popen(line, env=environment, pass_fds=(lifeline,), start_new_session=True)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def look(self) -> None:
        """Update whether it has ended, was stopped or was resumed."""
        if self.code is not None:
            return
        pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        if pid == 0:
            return
        if os.WIFSTOPPED(status):
            self.stopped = time.monotonic()
        elif os.WIFCONTINUED(status):
            self.stopped = None
        else:
            self.code = self._process.returncode = os.waitstatus_to_exitcode(status)

    def send(self, number: int) -> None:
        """Send a signal if it is running."""
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it if it is running."""
        if self.code is None:
            self.sent = True
            self.send(signal.SIGKILL)
            self._process.wait()
            self.code = self._process.returncode


def _reported(store: TCPStore) -> str | None:
    """What the processes have found out about the one that is lost."""
    return store.get(LOST_KEY).decode() if store.check([LOST_KEY]) else None


def _supervise(
    ranks: list[_RankProcess], asked: list[int], tell: Callable[[str], None], reported: Callable[[], str | None]
) -> int:
    """Wait until all processes have ended, and return the exit code."""
    told: set[_RankProcess] = set()
    forwarded, limit = 0, ranks_timeout()
    while any(rank.code is None for rank in ranks):
        for rank in ranks:
            rank.look()
        for number in asked[forwarded:]:
            for rank in ranks:
                rank.send(number)
                rank.send(signal.SIGCONT)  # a stopped process could not save
        forwarded = len(asked)
        _tell_of_stops(ranks, told, tell, limit)
        longest = [rank for rank in ranks if rank.code is None and rank.stopped and time.monotonic() - rank.stopped > limit]
        if longest or any(rank.code for rank in ranks):
            culprit = _culprit(ranks, longest, reported())
            _end(ranks)
            if culprit is not None:
                raise culprit
            break
        time.sleep(_LOOK)
    return _exit_code([rank.code or 0 for rank in ranks], asked)


def _tell_of_stops(ranks: list[_RankProcess], told: set[_RankProcess], tell: Callable[[str], None], limit: float) -> None:
    for rank in ranks:
        if rank.code is None and rank.stopped is not None and rank not in told:
            told.add(rank)
            tell(
                f"{rank.name} was stopped by a signal, and the others wait for it; kill -CONT {rank.pid} resumes it. "
                f"The run ends if it stays stopped for {limit:,.0f} seconds ({TIMEOUT_VARIABLE})"
            )
        elif rank.stopped is None and rank in told:
            told.remove(rank)
            if rank.code is None:
                tell(f"{rank.name} was resumed")


def _culprit(ranks: list[_RankProcess], longest: list[_RankProcess], reported: str | None) -> RanksError | None:
    """The reason why the processes have to end, if they cannot report it themselves."""
    again = "run the same command again; training continues from the last checkpoint"
    for rank in ranks:
        if rank.code is not None and rank.code < 0:
            name = signal.Signals(-rank.code).name
            memory = "the system does this when memory runs out; " if -rank.code == signal.SIGKILL else ""
            return RanksError(f"{rank.name} (pid {rank.pid}) was killed by {name}", hint=memory + again)
    stopped = [rank for rank in ranks if rank.code is None and rank.stopped is not None]
    for rank in longest or (stopped if any(rank.code == LOST_CONTACT for rank in ranks) else []):
        return RanksError(f"{rank.name} (pid {rank.pid}) was stopped by a signal and did not continue in time", hint=again)
    if any(rank.code not in (None, 0, LOST_CONTACT) for rank in ranks):
        return None  # it has reported the error itself
    return RanksError(
        reported or f"a process has not responded to the others for {ranks_timeout():,.0f} seconds",
        hint=f"{again}. If a step takes longer than that, set {TIMEOUT_VARIABLE} to more seconds",
    )


def _end(ranks: list[_RankProcess]) -> None:
    """End all processes: wait for them, then ask them to stop, then kill them."""
    for seconds, number in ((_LAST_WORDS, signal.SIGTERM), (_GRACE, None)):
        deadline = time.monotonic() + seconds
        while any(rank.code is None and rank.stopped is None for rank in ranks) and time.monotonic() < deadline:
            for rank in ranks:
                rank.look()
            time.sleep(_LOOK)
        for rank in ranks:
            if number is not None:
                rank.send(number)
    for rank in ranks:
        rank.kill()


def _exit_code(codes: list[int], asked: list[int]) -> int:
    """The common exit code: that of the signal that was passed on, or the largest one of an error."""
    for number in asked:
        if 128 + number in codes:
            return 128 + number
    failed = [code for code in codes if code > 0 and code != LOST_CONTACT]
    return max(failed, default=1 if any(codes) else 0)


@contextmanager
def _forwarded() -> Iterator[list[int]]:
    """Collect the signals to pass on; the previous handlers are restored afterwards."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, note) for number in handled()}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
