"""Tasks on a Ray cluster. Only the number of a task and an error travel; text, tokens and results are files."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from discern.data.stages.engines import Engine
from discern.data.stages.tasks import Task, attempt
from discern.errors import ConfigError, DataError

ADDRESS = "RAY_ADDRESS"
_RETRIES = 20
_WAKE_SECONDS = 1.0
_WAITING_PER_CPU = 4


@final
class RayEngine(Engine):
    """Joins the cluster of `RAY_ADDRESS`, or starts one on this machine, which ends with the command.

    A task of a machine that died is run again elsewhere, up to 20 times. A task that fails on purpose, because its input is
    damaged, is not.

    Args:
        workers: number of tasks at a time, if a cluster is started on this machine.

    Raises:
        ConfigError: the extra `ray` is not installed.
        DataError: no cluster answers at the address, or it has no processors.
    """

    def __init__(self, workers: int) -> None:
        if find_spec("ray") is None:
            raise ConfigError("--engine ray needs the package ray, which is not installed", hint="pip install 'discern-nlp[ray]'")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # With ray's default, a machine with an accelerator-less task would hide the accelerators of later tasks.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        self._ray: Any = ray
        address = os.environ.get(ADDRESS)
        here: dict[str, Any] = {} if address else {"num_cpus": workers, "include_dashboard": False}
        try:
            ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **here)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as problem:
            if not address:
                raise DataError(f"Ray cannot start on this machine: {problem}", hint="use --engine local") from problem
            raise DataError(
                f"no Ray cluster answers at {ADDRESS}={address}",
                hint=f"ray status --address {address} shows whether it runs; without {ADDRESS}, Ray starts on this machine",
            ) from problem
        if ray.cluster_resources().get("CPU", 0) < 1:
            self.__exit__()
            raise DataError("the Ray cluster has no processors for tasks", hint="add a machine: ray start --address HEAD:6379")

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def run(self, work: Path, fingerprint: str, tasks: Sequence[Task]) -> Iterator[Task]:
        remote = self._ray.remote(attempt).options(
            num_cpus=1, max_retries=_RETRIES, retry_exceptions=False, scheduling_strategy="SPREAD"
        )
        waiting: dict[Any, Task] = {}
        left = iter(tasks)
        try:
            while True:
                room = _WAITING_PER_CPU * max(1, int(self._ray.cluster_resources().get("CPU", 0)))
                while len(waiting) < room and (task := next(left, None)) is not None:
                    waiting[remote.remote(str(work), fingerprint, task)] = task
                if not waiting:
                    return
                # Ray waits in C, where a signal is not handled, so never for long.
                ready, _ = self._ray.wait(list(waiting), num_returns=1, timeout=_WAKE_SECONDS)
                for reference in ready:
                    task = waiting.pop(reference)
                    self._raise_if_failed(reference, task)
                    yield task
        finally:
            for reference in waiting:
                self._ray.cancel(reference, force=True)

    def _raise_if_failed(self, reference: Any, task: Task) -> None:
        try:
            problem = self._ray.get(reference)
        except self._ray.exceptions.RayError as failure:
            raise DataError(
                f"task {task[1]} of the stage '{task[0]}' failed on the Ray cluster: {failure}",
                hint="run the same command again to go on from the finished tasks; is discern installed on every machine?",
            ) from failure
        if problem is not None:
            raise problem
