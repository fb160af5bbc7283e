"""Detects that one of the processes that train together has died or hangs, and names it.

A thread of every rank writes a number into the store at which the ranks met, once a second. Rank 0 reads the numbers of all
others, and they read that of rank 0. Whoever finds a rank lost writes why; all read it and end. torch, files and the network
release the interpreter, so a long evaluation or a slow disk does not stop the thread; SIGSTOP, SIGKILL or the end of a machine
does. Only differences of each rank's own clock are used: the machines' clocks may differ.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from discern.errors import DiscernError
from discern.training.process import HEARTBEAT_VARIABLE, TIMEOUT_VARIABLE, launched_here, ranks_timeout

_INTERVAL = 1.0  # seconds between two numbers
_MOMENT = 5.0  # seconds in which a process that is alive certainly writes another number
# A rank whose main thread cannot notice, such as one that waits for a GPU, is ended by its watch. A checkpoint that is being
# written gets this long to be completed.
_GRACE = 15.0
_STORE_GRACE = 45.0  # without the store the ranks may all be alive: time to save and stop

FENCED = signal.SIGUSR1
"""Ends a process on this machine that has shown no sign of life."""

LEAVES_THE_REPORT = 128 + signal.SIGTERM
"""Exit code of a process that ends because another one has ended, which is reported elsewhere."""

LOST_HINT = "look for its message; the same command continues from the last checkpoint"
"""What to do when a process is lost."""

_KILLED = "has ended without a message, as if it was killed"
_WORKING, _WAITING, _LEFT = "working", "waiting", "left"


@dataclass(frozen=True)
class Member:
    """One of the processes that train together.

    Attributes:
        machine: identifies the machine, or the container, in which `pid` is valid.
    """

    rank: int
    host: str
    machine: str
    pid: int

    @classmethod
    def own(cls, rank: int) -> Member:
        """This process."""
        machine = host = socket.gethostname()
        with suppress(OSError):  # not Linux
            machine = f"{Path('/proc/sys/kernel/random/boot_id').read_text()} {os.readlink('/proc/self/ns/pid')}"
        return cls(rank, host, machine, os.getpid())

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class Heartbeat:
    """Shows the other ranks that this process is alive, and watches them, until it is closed.

    Args:
        rank: number of this process.
        members: all processes, by rank.
        group: name of the group, which no earlier group in the store has had.
        limit: seconds of silence after which a process is considered lost.
    """

    def __init__(self, rank: int, members: Sequence[Member], group: str, limit: float) -> None:
        self._rank, self._members, self._limit = rank, members, limit
        self._address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = TCPStore(*self._address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=limit))
        self._prefix = f"discern/{group}"
        self._number = 0
        self._state = _WORKING
        here = members[rank].machine
        self._here = [member.rank for member in members if member.machine == here]
        self._others = [member.rank for member in members if member.rank != rank]
        self._seen: dict[int, tuple[str, float]] = {}  # last number and seconds of silence, by rank
        self._reason: str | None = None
        self._lost: list[int] = []
        self._reports_itself = False
        self._known = threading.Event()
        self._closed = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to watch. All ranks have created their objects."""
        self._thread.start()

    def close(self) -> None:
        """Tell the others that this process leaves in good order, and stop watching."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._state = _LEFT
        with suppress(RuntimeError):  # the store has left before
            self._beat()

    def failed(self, problem: BaseException) -> None:
        """Tell the others why this process ends early."""
        if self._state == _WORKING:
            said = problem.message if isinstance(problem, DiscernError) else f"{type(problem).__name__}: {problem}"
            reason = f"{self._names([self._rank])} failed: {' '.join(said.split()) or type(problem).__name__}"
            self._post([self._rank], reason, reports_itself=True)

    def lost(self) -> str | None:
        """Which process is lost, and how, after an exchange with the others has failed; None if that cannot be found out.

        "" if another process on this machine reports it: one message is enough.
        """
        self._state = _WAITING
        with suppress(RuntimeError):  # the store has left before
            before = self._states(self._others)
            # Rank 0 decides on ranks that are alive but busy with something else, unless it is one of them.
            if not self._known.wait(_MOMENT + (0 if self._rank == 0 else 2 * _INTERVAL)):
                now = self._states(self._others).items()
                busy = [rank for rank, (number, state) in now if state == _WORKING and number != before[rank][0]]
                if busy:
                    why = f"did not join the others within {ranks_timeout():,.0f} seconds ({TIMEOUT_VARIABLE})"
                    self._post(busy, f"{self._names(busy)} {why}")
        self._known.wait(self._limit + 2 * _INTERVAL)  # the watches find silent ones
        return self._reported()

    def _reported(self) -> str | None:
        survivors = [rank for rank in self._here if rank not in self._lost] or [self._rank]
        reports_itself = self._reports_itself and not set(self._lost).isdisjoint(self._here)
        return "" if self._reason and (reports_itself or self._rank != survivors[0]) else self._reason

    def _watch(self) -> None:
        before, without = time.monotonic(), 0.0
        while not self._closed.wait(_INTERVAL):
            now = time.monotonic()
            # A process that was suspended counts no silence: the others were perhaps suspended with it.
            passed, before = min(now - before, 2 * _INTERVAL), now
            try:
                self._beat()
                self._look(passed)
                without = 0.0
            except RuntimeError:
                without += passed
                if without > 2 * _INTERVAL:
                    self._end_without_store()
            if self._reason is not None:
                self._known.set()
                self._end_by_force(_GRACE)

    def _look(self, passed: float) -> None:
        if self._store.check([f"{self._prefix}/lost"]):
            self._take(self._store.get(f"{self._prefix}/lost"))
            return
        states = self._states(self._others if self._rank == 0 else [0])
        for rank, (number, _) in states.items():
            last, silence = self._seen.get(rank, ("", 0.0))
            self._seen[rank] = number, silence + passed if number == last else 0.0
        silent = [rank for rank, (_, state) in states.items() if state == _WORKING and self._seen[rank][1] > self._limit]
        dead = [rank for rank in self._others if not self._is_alive(rank)]
        ended = [rank for rank, (_, state) in self._states(dead).items() if state == _WORKING]
        if ended:
            # Under --nproc the process that has started them all knows the signal, and reports it.
            self._post(ended, f"{self._names(ended)} {_KILLED}", reports_itself=launched_here())
        elif silent:
            seconds = max(self._seen[rank][1] for rank in silent)
            why = "it was killed or stopped, or its machine or network is down"
            signs = f"has shown no sign of life for {seconds:.0f} seconds ({HEARTBEAT_VARIABLE})"
            self._post(silent, f"{self._names(silent)} {signs}: {why}")
            for rank in set(silent).intersection(self._here):
                with suppress(ProcessLookupError, PermissionError):
                    # A stopped process that was resumed later could write to the same run.
                    os.kill(self._members[rank].pid, FENCED)
                    os.kill(self._members[rank].pid, signal.SIGCONT)

    def _states(self, ranks: Sequence[int]) -> Mapping[int, tuple[str, str]]:
        """Number and state of other processes by rank."""
        values = self._store.multi_get([f"{self._prefix}/{rank}" for rank in ranks]) if ranks else []
        pairs = (value.decode().partition(" ") for value in values)
        return {rank: (number, state) for rank, (number, _, state) in zip(ranks, pairs, strict=True)}

    def _beat(self) -> None:
        self._number += 1
        self._store.set(f"{self._prefix}/{self._rank}", f"{self._number} {self._state}")

    def _post(self, lost: Sequence[int], reason: str, *, reports_itself: bool = False) -> None:
        """Write why the processes have to end, unless another one has.

        Args:
            lost: ranks that are lost.
            reports_itself: whether the lost rank prints its own error, or another process on its machine does.
        """
        posted = json.dumps([reason, list(lost), reports_itself])
        with suppress(RuntimeError):  # the store has left before
            posted = self._store.compare_set(f"{self._prefix}/lost", "", posted).decode()
        self._take(posted)
        self._known.set()

    def _take(self, posted: str | bytes) -> None:
        self._reason, self._lost, self._reports_itself = json.loads(posted)

    def _is_alive(self, rank: int) -> bool:
        """Whether a process is alive; True if it is on another machine."""
        try:
            if rank in self._here:
                os.kill(self._members[rank].pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(self._members[rank].name for rank in ranks)

    def _end_without_store(self) -> None:
        """End, as nothing more can be learned about the others. They may all be alive if only torchrun's agent was killed."""
        host, port = self._address
        dead = self._lost = [rank for rank in self._others if not self._is_alive(rank)]
        gone = f"the store of the processes on {host}:{port} is gone"
        if dead:
            self._reason = f"{self._names(dead)} {_KILLED}, and {gone}"
        else:
            self._reason = f"{gone}: {self._members[0].name}, or torchrun there, has ended, or the machine is down"
        self._known.set()
        if self._state == _WORKING:
            sys.stderr.write(f"warning: {self._reason}; the run saves and stops if it can\n")
            os.kill(os.getpid(), signal.SIGTERM)
        self._end_by_force(_STORE_GRACE)

    def _end_by_force(self, grace: float) -> None:
        """End this process if its main thread does not do so in time: it may wait for a GPU for ever."""
        if self._closed.wait(grace):
            return
        reason = self._reported()
        if reason:
            # Not by the console, which belongs to the main thread. Flushed line by line.
            sys.stderr.write(f"error: {reason}\n  hint: {LOST_HINT}\n")
        os._exit(1 if reason else LEAVES_THE_REPORT)
