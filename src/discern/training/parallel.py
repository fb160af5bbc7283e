"""Ranks: which process this is, and sums over all of them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from discern.errors import ConfigError, DiscernError


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together.

    Attributes:
        rank: number of this process; 0 writes.
        world: how many there are.
        device: where this one computes.
    """

    rank: int
    world: int
    device: torch.device

    @property
    def writes(self) -> bool:
        """True in the one process that touches files."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Each value summed over all ranks, in float64."""
        if self.world == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self._exchange)
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in order, on every rank."""
        if self.world == 1:
            return [value]
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, value)
        return gathered

    def gather_first(self, value: Any) -> list[Any]:
        """The value of every rank, in order, on rank 0; nothing on the others."""
        if self.world == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.world if self.writes else None
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
        (problem, *_) = self.gather(problem)
        if problem is not None:
            raise problem

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            dist.barrier()

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
    """The ranks that torchrun started this process among; one of its own otherwise."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    chosen = choose_device(device)
    if world == 1:
        yield Ranks(0, 1, chosen)
        return
    if chosen.type == "cuda":
        local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= count:
            raise ConfigError(f"process {local} finds no GPU of its own: torch sees {count}", hint=f"use at most --nproc {count}")
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    # First, because torch._dynamo, which an optimizer's first step brings in, keeps whatever group there is when it comes:
    # the group's threads outlive it then, and one that asks for the interpreter while that shuts down aborts the process.
    importlib.import_module("torch._dynamo")
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield Ranks(rank, world, chosen)
    finally:
        dist.destroy_process_group()
