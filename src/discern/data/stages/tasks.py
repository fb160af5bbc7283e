"""One task on any machine: a stage and a number. Everything else is read from files, and the result is a file."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from discern.data.stages import duplicates, pieces, shards
from discern.data.stages.plan import plan_of_task
from discern.data.stages.results import finished
from discern.errors import DiscernError

Stage = Literal["pieces", "buckets", "clusters", "placed", "shards"]
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
    (plan, tokenizer), folder = plan_of_task(work, fingerprint), Path(work)
    stage, index = task
    if finished(result_of(folder, task)) is not None:
        return
    if stage == "pieces":
        pieces.make_piece(folder, plan, tokenizer, index)
    elif stage == "buckets":
        duplicates.make_bucket(folder, plan, tokenizer, index)
    elif stage == "clusters":
        duplicates.make_clusters(folder, plan, tokenizer)
    elif stage == "placed":
        shards.place(folder, plan, tokenizer, duplicates.removed(folder, plan))
    else:
        shards.make_shard(folder, plan, tokenizer, index)


def result_of(work: Path, task: Task) -> Path:
    """The folder of a task's result."""
    stage, index = task
    if stage == "pieces":
        return pieces.piece_folder(work, index)
    if stage == "buckets":
        return duplicates.bucket_folder(work, index)
    if stage == "clusters":
        return duplicates.clusters_folder(work)
    return shards.placed_folder(work) if stage == "placed" else shards.shard_folder(work, index)


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
