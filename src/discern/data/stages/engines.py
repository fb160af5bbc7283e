"""What runs the tasks of a stage: processes of this machine, or a Ray cluster."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, final

from discern.data.executors import WorkerPool
from discern.data.stages.tasks import Task, task_service

EngineName = Literal["local", "ray"]


class Engine(abc.ABC):
    """Runs the tasks of a stage. As a context manager it frees its resources at the end of the block."""

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @abc.abstractmethod
    def run(self, work: Path, fingerprint: str, tasks: Sequence[Task]) -> Iterator[Task]:
        """Run tasks that do not depend on each other; yields each when it is finished.

        Raises:
            DiscernError: a task raised it; the results of the others stay.
        """


@final
class LocalEngine(Engine):
    """Processes of this machine.

    Args:
        workers: number of processes.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def run(self, work: Path, fingerprint: str, tasks: Sequence[Task]) -> Iterator[Task]:
        arguments, workers = (str(work), fingerprint), min(self._workers, len(tasks))
        if workers <= 1:  # not worth a process
            yield from map(task_service(*arguments), tasks)
        else:
            with WorkerPool[Task, Task](task_service, arguments, workers) as pool:
                yield from pool.map(tasks)


def engine_of(name: EngineName, workers: int) -> Engine:
    """The engine of a name.

    Args:
        workers: number of processes, for this machine.

    Raises:
        ConfigError: the extra `ray` is not installed.
    """
    if name == "ray":
        from discern.data.stages.ray_engine import RayEngine

        return RayEngine(workers)
    return LocalEngine(workers)
