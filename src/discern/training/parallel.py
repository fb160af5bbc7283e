"""Ranks: which process this is, and sums over all of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from discern.errors import ConfigError, DiscernError, RanksError
from discern.training.place import LOST_CONTACT, PATIENCE, is_launched, patience, place

# The first rank may predict large files or write to a slow disk while the others wait.
_LONGEST_WORK = timedelta(hours=24)


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together.

    Attributes:
        rank: number of this process; 0 writes.
        world: how many there are.
        device: where this one computes.
        waiting: holds the group of the exchanges in which the others wait for work of rank 0; in all others a rank that does not
            answer is given up after `patience()` seconds.
    """

    rank: int
    world: int
    device: torch.device
    waiting: list[Any] = field(default_factory=list)

    @property
    def writes(self) -> bool:
        """True in the one process that touches files."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Each value summed over all ranks, in float64."""
        if self.world == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self._exchange)
        with _in_contact():
            dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def gather(self, value: Any, *, waits: bool = False) -> list[Any]:
        """The value of every rank, in order, on every rank.

        Args:
            waits: rank 0 may have long work to do before.
        """
        if self.world == 1:
            return [value]
        gathered: list[Any] = [None] * self.world
        with _in_contact():
            dist.all_gather_object(gathered, value, group=self.waiting[0] if waits else None)
        return gathered

    def gather_first(self, value: Any) -> list[Any]:
        """The value of every rank, in order, on rank 0; nothing on the others."""
        if self.world == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.world if self.writes else None
        with _in_contact():
            dist.gather_object(value, gathered)
        return gathered or []

    def by_first(self, action: Callable[[], None]) -> None:
        """Have rank 0 look into a folder and write; the others, who might see it half written, go by what it found.

        Raises:
            DiscernError: what `action` raised, on every rank.
        """
        problem: DiscernError | None = None
        if self.writes:
            try:
                action()
            except DiscernError as found:
                problem = found
        (problem, *_) = self.gather(problem, waits=True)
        if problem is not None:
            raise problem

    def barrier(self) -> None:
        """Wait for all ranks, and for the work that rank 0 does alone."""
        if self.world > 1:
            with _in_contact():
                dist.barrier(group=self.waiting[0])

    @property
    def _exchange(self) -> torch.device:
        return self.device if self.device.type == "cuda" else torch.device("cpu")


def choose_device(name: str) -> torch.device:
    """The device that a name means; 'auto' takes a GPU where there is one.

    Raises:
        ConfigError: the machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise ConfigError(f"unknown device '{name}'", hint="auto, cpu, cuda, cuda:1, ...") from problem
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda was asked for, but torch sees no GPU", hint="leave --device out, or see `nvidia-smi`")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"there is no {device}; torch sees {torch.cuda.device_count()} GPUs", hint="cuda:0 is the first")
    return device


@contextmanager
def join_ranks(device: str) -> Iterator[Ranks]:
    """The ranks that torchrun or `--nproc` started this process among; one of its own otherwise.

    Raises:
        ConfigError: there are fewer GPUs than ranks, or the environment does not make sense.
        RanksError: another rank has ended, or does not answer.
    """
    own, chosen = place(), choose_device(device)
    if own.world == 1:
        yield Ranks(0, 1, chosen)
        return
    if chosen.type == "cuda":
        count = torch.cuda.device_count()
        if own.local_world > count:  # in all of them alike, so that the first can say it
            raise ConfigError(
                f"{own.local_world} processes need as many GPUs; torch sees {count}", hint=f"use at most --nproc {count}"
            )
        chosen = torch.device("cuda", own.local_rank)
        torch.cuda.set_device(chosen)
    # First, because torch._dynamo, which an optimizer's first step brings in, keeps whatever group there is when it comes:
    # the group's threads outlive it then, and one that asks for the interpreter while that shuts down aborts the process.
    importlib.import_module("torch._dynamo")
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    with _in_contact():
        dist.init_process_group(backend, timeout=timedelta(seconds=patience()))
    waiting: list[Any] = []
    try:
        with _in_contact():  # gradients are exchanged by torch itself
            waiting.append(dist.new_group(backend="gloo", timeout=_LONGEST_WORK))
            yield Ranks(own.rank, own.world, chosen, waiting)
    finally:
        waiting.clear()  # whoever still holds the ranks must not keep the group's threads alive
        dist.destroy_process_group()


@contextmanager
def _in_contact() -> Iterator[None]:
    """Turn what torch says when another rank has ended, or does not answer, into our own error."""
    try:
        yield
    except RuntimeError as problem:
        if not _says_lost(problem):
            raise
        if is_launched():
            raise SystemExit(LOST_CONTACT) from problem
        raise RanksError(
            f"another of the processes that train together has ended, or has not responded for {patience():,.0f} seconds",
            hint="look for its message; the same command continues from the last checkpoint. If steps take longer than that, set "
            f"{PATIENCE} to more seconds",
        ) from problem


def _says_lost(problem: RuntimeError) -> bool:
    said = str(problem).lower()
    lost = ("gloo", "nccl", "connection closed", "connection reset", "connection refused", "broken pipe", "timed out")
    return isinstance(problem, dist.DistError) or any(words in said for words in lost)
