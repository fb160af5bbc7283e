"""Worker processes: the parent's side, and the code that runs in the child.

A worker is a plain child process rather than one of `multiprocessing`: it needs no fork of a process with threads and no second
run of the caller's main module, and it ends by itself when its parent dies, because its input ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, TypeVar

from discern.errors import DataError, DiscernError

Message = TypeVar("Message")
Reply = TypeVar("Reply")


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has no such limit


class WorkerDiedError(DataError):
    """A worker process ended without being told to."""


class WorkerProcess(Generic[Message, Reply]):
    """A process that answers messages, one at a time.

    Args:
        make: importable function that returns the service, which maps a message to its reply.
        arguments: arguments of `make`.
        threads: number of threads that the tokenizers library may use in the process.
    """

    def __init__(self, make: Callable[..., Callable[[Message], Reply]], arguments: tuple[object, ...], threads: int) -> None:
        environment = os.environ | {
            "RAYON_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false",
        }
        program = "import sys; sys.path[:] = sys.argv[1:]; from discern.data.executors import serve; serve()"
        # A process group of its own: Ctrl-C in the terminal reaches only the parent, which ends its workers itself.
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            process_group=0,
        )
        self._first: tuple[object, ...] | None = (make, arguments)

    def __enter__(self) -> WorkerProcess[Message, Reply]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
        self.close()

    def ask(self, message: Message) -> Reply:
        """Send a message and wait for the reply.

        Raises:
            WorkerDiedError: the process died.
            DiscernError: the service raised it.
        """
        try:
            if self._first is not None:
                self._send(self._first)
                self._first = None
            self._send(message)
            assert self._process.stdout is not None
            reply, error = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as problem:
            raise WorkerDiedError(
                f"a worker process ended unexpectedly (exit status {self._process.wait()})",
                hint="if memory ran out, use fewer --workers; otherwise see its output above",
            ) from problem
        if error is not None:
            raise error
        answer: Reply = reply
        return answer

    def kill(self) -> None:
        """End the process now. An `ask` in another thread fails."""
        self._process.kill()

    def close(self) -> None:
        """Free the resources of a process that was killed."""
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # the rest of a message that is no longer read
                    stream.close()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump(message, self._process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
        self._process.stdin.flush()


class WorkerPool(Generic[Message, Reply]):
    """Several processes with the same service, each with one thread.

    Args:
        make: importable function that returns the service.
        arguments: arguments of `make`.
        workers: number of processes.
    """

    def __init__(self, make: Callable[..., Callable[[Message], Reply]], arguments: tuple[object, ...], workers: int) -> None:
        self._workers: list[WorkerProcess[Message, Reply]] = []
        self._idle: queue.SimpleQueue[WorkerProcess[Message, Reply]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="worker")
        try:
            for _ in range(workers):
                self._workers.append(WorkerProcess(make, arguments, threads=1))
                self._idle.put(self._workers[-1])
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> WorkerPool[Message, Reply]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def map(self, messages: Iterable[Message]) -> Iterator[Reply]:
        """The replies in the order of the messages. At most two messages per process are in progress.

        Raises:
            DataError: a process died.
            DiscernError: the service raised it.
        """
        pending: deque[Future[Reply]] = deque()
        for message in messages:
            pending.append(self._threads.submit(self._ask, message))
            if len(pending) >= 2 * len(self._workers):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def _ask(self, message: Message) -> Reply:
        """Ask an idle process. Runs in a thread."""
        worker = self._idle.get()
        try:
            return worker.ask(message)
        finally:
            self._idle.put(worker)

    def _stop(self) -> None:
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.close()


Service = Callable[[Any], Any]
"""A function from a message to its reply."""


def serve() -> None:
    """Answer messages on standard input with `(reply, error)` on standard output; runs in the child.

    The first message is a function and its arguments; the function returns the service.
    """
    incoming = sys.stdin.buffer
    outgoing = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not mix with the replies
    try:
        make, arguments = pickle.load(incoming)
        service: Service = make(*arguments)
        while True:
            reply = _reply(service, pickle.load(incoming))
            pickle.dump(reply, outgoing, protocol=pickle.HIGHEST_PROTOCOL)
            outgoing.flush()
    except EOFError:  # no more work
        return
    except BrokenPipeError:  # the parent is gone
        os._exit(1)


def _reply(service: Service, message: Any) -> tuple[Any, DiscernError | None]:
    try:
        return service(message), None
    except DiscernError as problem:
        return None, problem
