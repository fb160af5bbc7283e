"""One task on any machine: a stage and a number. Everything else is read from files, and the result is a file."""

from __future__ import annotations

import socket
from collections.abc import Callable

from discern.data.stages import duplicates, pieces, shards
from discern.data.stages.plan import job_of_task
from discern.data.stages.results import Stage, finished, result_folder, result_of
from discern.errors import DiscernError

Task = tuple[Stage, int]


def perform(work: str, fingerprint: str, task: Task) -> None:
    """Do a task, unless its result exists and is intact.

    Args:
        work: folder of the plan, at the same path on every machine.
        fingerprint: checksum of the plan.
        task: the stage and the number of the task in it.

    Raises:
        DataError: the input cannot be read, the result cannot be written, or this machine sees another plan.
        ConfigError: the input lacks the field of the text, or an optional package is missing on this machine.
    """
    job, (stage, index) = job_of_task(work, fingerprint), task
    folder = result_of(job.folder, stage, index)
    if finished(folder) is not None:
        return
    with result_folder(folder) as aside:
        if stage == "pieces":
            pieces.make_piece(job, index, aside)
        elif stage == "buckets":
            duplicates.make_bucket(job, index, aside)
        elif stage == "clusters":
            duplicates.make_clusters(job, aside)
        elif stage == "placed":
            shards.place(job, duplicates.removed(job), aside)
        else:
            shards.make_shard(job, index, aside)


def task_service(work: str, fingerprint: str) -> Callable[[Task], Task]:
    """The service of a worker process that does tasks."""

    def serve(task: Task) -> Task:
        perform(work, fingerprint, task)
        return task

    return serve


def attempt(work: str, fingerprint: str, task: Task) -> DiscernError | None:
    """Do a task; returns the error, with the machine, if one was raised on purpose: the task is not tried again for it."""
    try:
        perform(work, fingerprint, task)
    except DiscernError as problem:
        return type(problem)(f"{problem.message} (on {socket.gethostname()})", hint=problem.hint)
    return None
