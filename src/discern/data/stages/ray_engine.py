"""Tasks on a Ray cluster. Only the number of a task and an error travel; text, tokens and results are files.

Ray runs in a process of its own: it replaces the standard streams and the handlers of signals, and ends the process that uses it
when it loses the connection to the cluster. Tasks can be run twice without harm, so another process then takes over.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from discern.data.executors import WorkerDiedError, WorkerProcess
from discern.data.stages.engines import Engine
from discern.data.stages.tasks import Task, attempt
from discern.errors import ConfigError, DataError

ADDRESS = "RAY_ADDRESS"
_RETRIES = 20
_LOST_CONNECTIONS = 3
_WAKE_SECONDS = 1.0
_ANSWER_SECONDS = 10
_WAITING_PER_CPU = 4

Message = tuple[str, str, list[Task]] | None
"""The folder of the work, the checksum of the plan and new tasks; None to leave the cluster."""


@final
class RayEngine(Engine):
    """Joins the cluster of `RAY_ADDRESS`, or starts one on this machine, which ends with the command.

    A task of a machine that died is run again elsewhere, up to 20 times. A task that fails on purpose, because its input is
    damaged, is not.

    Args:
        workers: number of tasks at a time, if a cluster is started on this machine.

    Raises:
        ConfigError: the extra `ray` is not installed.
        DataError: no cluster answers at the address.
    """

    def __init__(self, workers: int) -> None:
        if find_spec("ray") is None:
            raise ConfigError("--engine ray needs the package ray, which is not installed", hint="pip install 'discern-nlp[ray]'")
        if address := os.environ.get(ADDRESS):
            _check_answers(address)
        self._workers = workers
        self._process: WorkerProcess[Message, list[Task]] | None = None

    def __exit__(self, *error: object) -> None:
        if self._process is None:
            return
        try:
            if error[0] is None:
                self._process.ask(None)
        except WorkerDiedError:  # the cluster ended first
            pass
        finally:
            self._end()

    def run(self, work: Path, fingerprint: str, tasks: Sequence[Task]) -> Iterator[Task]:
        left = dict.fromkeys(tasks)
        new, lost = list(tasks), 0
        while left:
            if self._process is None:
                self._process = WorkerProcess(cluster_service, (self._workers,), threads=1)
                new = list(left)
            try:
                done = self._process.ask((str(work), fingerprint, new))
            except WorkerDiedError as problem:
                self._end()
                lost += 1
                if lost > _LOST_CONNECTIONS:
                    raise DataError(
                        f"the connection to the Ray cluster was lost {lost} times without a task finished",
                        hint="run the same command again to continue from the finished tasks; Ray's logs are in /tmp/ray",
                    ) from problem
                continue
            new = []
            for task in done:
                lost = 0
                if task in left:
                    del left[task]
                    yield task

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.close()
            self._process = None


class _Cluster:
    """The cluster, in the process that uses it.

    Raises:
        DataError: no cluster answers, it cannot be started, or it has no processors.
    """

    def __init__(self, workers: int) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Without a GPU of its own, a task would not see those of the machine; Ray warns that this will change.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        self._ray: Any = ray
        self._waiting: dict[Any, Task] = {}
        self._left: list[Task] = []
        address = os.environ.get(ADDRESS)
        here: dict[str, Any] = {} if address else {"num_cpus": workers, "include_dashboard": False}
        try:
            ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **here)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as problem:
            if address:
                raise _silent(address) from problem
            raise DataError(f"Ray cannot start on this machine: {problem}", hint="use --engine local") from problem
        self._remote = self._ray.remote(attempt).options(
            num_cpus=1, max_retries=_RETRIES, retry_exceptions=False, scheduling_strategy="SPREAD"
        )

    def do(self, message: Message) -> list[Task]:
        """Submit new tasks; returns those that have finished since, after at most a second.

        Raises:
            DataError: a task failed, or the cluster has no processors.
        """
        if message is None:
            self._ray.shutdown()
            return []
        work, fingerprint, new = message
        self._left += new
        room = _WAITING_PER_CPU * self._processors()
        while self._left and len(self._waiting) < room:
            task = self._left.pop(0)
            self._waiting[self._remote.remote(work, fingerprint, task)] = task
        ready, _ = self._ray.wait(list(self._waiting), num_returns=len(self._waiting), timeout=_WAKE_SECONDS)
        return [self._finished(reference) for reference in ready]

    def _processors(self) -> int:
        found = int(self._ray.cluster_resources().get("CPU", 0))
        if found < 1:
            raise DataError("the Ray cluster has no CPUs for tasks", hint="add a machine: ray start --address HEAD:6379")
        return found

    def _finished(self, reference: Any) -> Task:
        task = self._waiting.pop(reference)
        try:
            problem = self._ray.get(reference)
        except self._ray.exceptions.RayError as failure:
            raise DataError(
                f"task {task[1]} of the stage '{task[0]}' failed on the Ray cluster: {failure}",
                hint="check that discern is installed on every machine, then run the same command again to continue from the "
                "finished tasks",
            ) from failure
        if problem is not None:
            raise problem
        return task


def cluster_service(workers: int) -> Callable[[Message], list[Task]]:
    """The service of the process that uses the cluster."""
    cluster: list[_Cluster] = []

    def serve(message: Message) -> list[Task]:
        if not cluster:  # here, where an error becomes a reply
            cluster.append(_Cluster(workers))
        return cluster[0].do(message)

    return serve


def _check_answers(address: str) -> None:
    """Check that something listens at an address; Ray itself waits for many minutes.

    Raises:
        DataError: nothing does.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():  # "auto", "local"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
    except (OSError, OverflowError) as problem:
        raise _silent(address) from problem


def _silent(address: str) -> DataError:
    return DataError(
        f"no Ray cluster answers at {ADDRESS}={address}",
        hint=f"ray status --address {address} shows whether it is running; without {ADDRESS}, Ray starts on this machine",
    )
