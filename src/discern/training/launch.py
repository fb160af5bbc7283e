"""Starting several ranks on this machine, as torchrun does, and looking after them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from discern.errors import RanksError
from discern.training.interrupt import handled
from discern.training.place import LIFELINE, LOST_CONTACT, PATIENCE, patience

_LOOK = 0.1  # seconds between looks at the processes
# A process that failed has said why; the others notice that it is gone, and what they still say should not be cut off.
_LAST_WORDS = 5.0
_GRACE = 20.0  # seconds from SIGTERM to SIGKILL


def launch(
    arguments: Sequence[str], nproc: int, tell: Callable[[str], None], program: Sequence[str] = (sys.executable, "-m", "discern")
) -> int:
    """Run `python -m discern ARGUMENTS` in `nproc` processes that know each other; gives the exit code.

    The processes write to this one's stdout and stderr. SIGINT, SIGTERM and SIGHUP reach them all. When this process ends in any
    way, even by SIGKILL, they save and stop; when one of them ends with an error, so do the others.

    Args:
        tell: told of a process that is stopped, and that it goes on.
        program: what is run with the arguments.

    Raises:
        RanksError: a process was killed, or stayed stopped.
    """
    # The processes meet here: a port of this process is taken by nobody else between being found and being used.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reading, writing = os.pipe()
    ranks: list[_Rank] = []
    with _forwarded() as asked:
        try:
            for number in range(nproc):
                ranks.append(_Rank(number, nproc, [*program, *arguments], store.port, reading))
            os.close(reading)
            return _look_after(ranks, asked, tell)
        finally:
            for rank in ranks:
                rank.kill()
            os.close(writing)


class _Rank:
    """One of the processes.

    Attributes:
        code: how it ended, as of `subprocess`; None while it lives.
        stopped: when it was stopped; None while it runs.
        sent: we have sent it SIGKILL.
    """

    def __init__(self, number: int, nproc: int, line: Sequence[str], port: int, lifeline: int) -> None:
        self.name = f"process {number} of {nproc}"
        self.code: int | None = None
        self.stopped: float | None = None
        self.sent = False
        threads = max(1, (os.cpu_count() or 1) // nproc)
        environment = {
            "OMP_NUM_THREADS": str(threads),
            **os.environ,
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 need not open the port: this process has
            LIFELINE: str(lifeline),
        }
        # Away from the terminal's signals: Ctrl-C would reach them twice, and the second one cuts off the saving.
        self._process = subprocess.Popen(line, env=environment, pass_fds=(lifeline,), start_new_session=True)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def look(self) -> None:
        """Note whether it has ended, was stopped or goes on."""
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
        """Send a signal, if it lives."""
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once, if it lives."""
        if self.code is None:
            self.sent = True
            self.send(signal.SIGKILL)
            self._process.wait()
            self.code = self._process.returncode


def _look_after(ranks: list[_Rank], asked: list[int], tell: Callable[[str], None]) -> int:
    """Wait until all have ended."""
    told: set[_Rank] = set()
    forwarded, limit = 0, patience()
    while any(rank.code is None for rank in ranks):
        for rank in ranks:
            rank.look()
        for number in asked[forwarded:]:
            for rank in ranks:
                rank.send(number)
                rank.send(signal.SIGCONT)  # one that is stopped could not save
        forwarded = len(asked)
        _tell_of_stops(ranks, told, tell, limit)
        longest = [rank for rank in ranks if rank.code is None and rank.stopped and time.monotonic() - rank.stopped > limit]
        if longest or any(rank.code for rank in ranks):
            culprit = _culprit(ranks, longest)
            _end(ranks)
            if culprit is not None:
                raise culprit
            break
        time.sleep(_LOOK)
    return _exit_code([rank.code or 0 for rank in ranks], asked)


def _tell_of_stops(ranks: list[_Rank], told: set[_Rank], tell: Callable[[str], None], limit: float) -> None:
    for rank in ranks:
        if rank.code is None and rank.stopped is not None and rank not in told:
            told.add(rank)
            tell(
                f"{rank.name} was stopped by a signal, and the others wait for it; kill -CONT {rank.pid} resumes it. "
                f"The run ends if it stays stopped for {limit:,.0f} seconds ({PATIENCE})"
            )
        elif rank.stopped is None and rank in told:
            told.remove(rank)
            if rank.code is None:
                tell(f"{rank.name} was resumed")


def _culprit(ranks: list[_Rank], longest: list[_Rank]) -> RanksError | None:
    """Why the processes have to end, where they cannot say so themselves."""
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
        return None  # it has said itself what is wrong
    return RanksError(
        f"a process did not respond to the others for {patience():,.0f} seconds",
        hint=f"{again}. If a step takes longer than that, set {PATIENCE} to more seconds",
    )


def _end(ranks: list[_Rank]) -> None:
    """End all that still run: by themselves, asked, at once."""
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
    """The exit code of all: that of the signal that they were sent, or the largest that says what is wrong."""
    for number in asked:
        if 128 + number in codes:
            return 128 + number
    failed = [code for code in codes if code > 0 and code != LOST_CONTACT]
    return max(failed, default=1 if any(codes) else 0)


@contextmanager
def _forwarded() -> Iterator[list[int]]:
    """The signals that have come, which are to be passed on; the handlers from before come back."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, note) for number in handled()}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
