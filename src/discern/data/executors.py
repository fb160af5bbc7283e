"""Executors with the interface of `concurrent.futures`: processes of this machine, or the tasks of a Ray cluster.

Another kind of cluster needs `submit` and `shutdown` and nothing else: text, tokens and results are files, so that only the name
of a function, its arguments and an error travel.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

from discern.errors import ConfigError, DataError, DiscernError

EngineName = Literal["local", "ray"]
Item = TypeVar("Item")
Result = TypeVar("Result")


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has no such limit


def ordered_map(
    executor: Executor, function: Callable[[Item], Result], items: Iterable[Item], *, pending: int
) -> Iterator[Result]:
    """The results in the order of the items, of which at most `pending` are taken ahead; `Executor.map` takes all of them."""
    futures: deque[Future[Result]] = deque()
    for item in items:
        futures.append(executor.submit(function, item))
        if len(futures) >= pending:
            yield futures.popleft().result()
    while futures:
        yield futures.popleft().result()


class ProcessExecutor(Executor):
    """Processes of this machine, which end when this process ends, however it does.

    They are plain child processes rather than those of `multiprocessing`: these need a fork of a process with threads, or a
    second run of the caller's main module, and stay behind when their parent is killed.

    Args:
        workers: number of processes.
        threads: number of threads that the tokenizers library may use in each.
    """

    def __init__(self, workers: int, threads: int = 1) -> None:
        self._threads = ThreadPoolExecutor(workers)
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        environment = {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": str(threads > 1).lower()}
        program = "import sys; sys.path[:] = sys.argv[1:]; from discern.data.executors import serve; serve()"
        # A process group of its own: Ctrl-C in the terminal reaches only the parent, which ends its workers itself.
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", program, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | environment,
                process_group=0,
            )
            for _ in range(workers)
        ]
        for process in self._processes:
            self._idle.put(process)

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:  # type: ignore[override]
        return self._threads.submit(self._call, function, arguments)

    def _call(self, *call: Any) -> Any:
        """The result of a call in an idle process. Runs in a thread."""
        process = self._idle.get()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(call, process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            result, error = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as problem:
            raise DataError(
                f"a worker process ended unexpectedly (exit status {process.wait()})",
                hint="if memory ran out, use fewer --workers; otherwise see its output above",
            ) from problem
        finally:
            self._idle.put(process)
        if error is not None:
            raise error
        return result

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes now."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with suppress(BrokenPipeError):  # the rest of a message that is no longer read
                    stream.close()


def serve() -> None:
    """Answer calls on standard input with `(result, error)` on standard output; runs in the child."""
    outgoing = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not mix with the replies
    try:
        while True:
            pickle.dump(reply_to(*pickle.load(sys.stdin.buffer)), outgoing, protocol=pickle.HIGHEST_PROTOCOL)
            outgoing.flush()
    except EOFError:  # no more work
        return
    except BrokenPipeError:  # the parent is gone
        os._exit(1)


def reply_to(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, DiscernError | None]:
    """The result of a call, or the error that it raised on purpose."""
    try:
        return function(*arguments), None
    except DiscernError as problem:
        return None, problem


ADDRESS = "RAY_ADDRESS"
_RETRIES = 20
_ANSWER_SECONDS = 10


class RayExecutor(Executor):
    """The cluster of `RAY_ADDRESS`, or one on this machine, which ends with the executor.

    A task of a machine that died is run again elsewhere, up to 20 times; one that raises a `DiscernError` is not.

    Args:
        workers: number of tasks at a time, if a cluster is started on this machine.

    Raises:
        ConfigError: the extra `ray` is not installed.
        DataError: no cluster answers, it cannot be started, or it has no processors.
    """

    def __init__(self, workers: int) -> None:
        if find_spec("ray") is None:
            raise ConfigError("--engine ray needs the package ray, which is not installed", hint="pip install 'discern-nlp[ray]'")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        self._ray: Any = ray
        address = os.environ.get(ADDRESS)
        here: dict[str, Any] = {} if address else {"num_cpus": workers, "include_dashboard": False}
        try:
            host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
            if colon and port.isdecimal():  # Ray itself waits for minutes
                socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
            ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **here)
        except (OSError, OverflowError, RuntimeError, ValueError) as problem:
            if address:
                hint = (
                    f"ray status --address {address} shows whether it is running; without {ADDRESS}, Ray starts on this machine"
                )
                raise DataError(f"no Ray cluster answers at {ADDRESS}={address}", hint=hint) from problem
            raise DataError(f"Ray cannot start on this machine: {problem}", hint="use --engine local") from problem
        if self._ray.cluster_resources().get("CPU", 0) < 1:
            raise DataError("the Ray cluster has no CPUs for tasks", hint="add a machine: ray start --address HEAD:6379")
        options = {"num_cpus": 1, "max_retries": _RETRIES, "retry_exceptions": False, "scheduling_strategy": "SPREAD"}
        self._reply_to = ray.remote(reply_to).options(**options)

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()

        def finish(done: Future[Any]) -> None:
            try:
                result, error = done.result()
            except self._ray.exceptions.RayError as problem:
                hint = "check that discern is installed on every machine, then run the same command again to continue"
                result, error = None, DataError(f"a task failed on the Ray cluster: {problem}", hint=hint)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self._reply_to.remote(function, arguments).future().add_done_callback(finish)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster."""
        self._ray.shutdown()
