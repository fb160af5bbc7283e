"""Ranks of distributed training: sums and gathers over all of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from discern.errors import ConfigError, DiscernError, RanksError
from discern.training.heartbeat import LOST_HINT, Heartbeat, Member
from discern.training.interrupt import stop_on_signals
from discern.training.meeting import meet, open_store
from discern.training.rank_environment import LOST_CONTACT, heartbeat_timeout, is_launched, rank_environment, ranks_timeout

# Rank 0 may predict large files or write to a slow disk while the others wait.
LONGEST_WORK = timedelta(hours=24)


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together.

    Attributes:
        rank: number of this process; rank 0 writes.
        world_size: number of processes.
        device: device on which this process computes.
        waiting: holds the process group for exchanges in which the others wait for work of rank 0. In all other exchanges, a rank
            that does not respond is considered lost after `ranks_timeout()` seconds.
        hosts: holds the process group for numbers that the hosts know, if the devices have another one.
        closing: what else to do before the process groups end.
        heartbeat: knows which process is lost, when an exchange fails.
    """

    rank: int
    world_size: int
    device: torch.device
    waiting: list[Any] = field(default_factory=list)
    hosts: list[Any] = field(default_factory=list)
    heartbeat: Heartbeat | None = None
    closing: list[Callable[[], None]] = field(default_factory=list)

    @property
    def reads_freely(self) -> bool:
        """Whether the host can read a value of the device without waiting for it: on the CPU the two are one."""
        return self.device.type == "cpu"

    @property
    def writes(self) -> bool:
        """Whether this process writes files: True on rank 0."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Sum each value over all ranks, in float64. Waits for the other ranks, but for no device."""
        if self.world_size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        with _in_contact(self.heartbeat):
            dist.all_reduce(total, group=self.hosts[0] if self.hosts else None)
        return [float(value) for value in total.tolist()]

    def sum_tensor(self, values: Tensor) -> Tensor:
        """Sum a tensor over all ranks."""
        if self.world_size == 1:
            return values
        total = values.to(self._exchange, copy=True)
        with _in_contact(self.heartbeat):
            dist.all_reduce(total)
        return total

    def gather(self, value: Any, *, waits: bool = False) -> list[Any]:
        """Return the values of all ranks in order, on every rank.

        Args:
            waits: rank 0 may have long work to do first.
        """
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        with _in_contact(self.heartbeat):
            dist.all_gather_object(gathered, value, group=self.waiting[0] if waits else None)
        return gathered

    def gather_first(self, value: Any) -> list[Any]:
        """Return the values of all ranks in order on rank 0, and an empty list on the others."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.world_size if self.writes else None
        with _in_contact(self.heartbeat):
            dist.gather_object(value, gathered)
        return gathered or []

    def run_on_rank_zero(self, action: Callable[[], None]) -> None:
        """Run an action on rank 0 only, for folders that the others might see half written.

        Raises:
            DiscernError: the error that `action` raised, on every rank.
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
        """Wait for all ranks, including work that rank 0 does alone."""
        if self.world_size > 1:
            with _in_contact(self.heartbeat):
                dist.barrier(group=self.waiting[0])

    @property
    def _exchange(self) -> torch.device:
        return self.device if self.device.type == "cuda" else torch.device("cpu")


def choose_device(name: str) -> torch.device:
    """Return the device of this name; 'auto' chooses a GPU if there is one.

    Raises:
        ConfigError: the machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "meta":
        raise ConfigError(
            "device 'meta' computes no numbers, so nothing can be trained on it",
            hint="use cpu or cuda; `discern bench --device meta` counts the FLOPs and the memory of a training step",
        )
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise ConfigError(f"unknown device '{name}'", hint="devices are auto, cpu, cuda, cuda:1, ...") from problem
    there = _devices()
    if device.type == "cuda" and len(there) == 1:
        raise ConfigError(
            f"device {name} was requested, but torch sees no GPU for CUDA; this machine has {there[0]}",
            hint="leave the device out, or see `nvidia-smi` and `discern doctor`",
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"there is no {device}; this machine has {', '.join(there)}", hint="cuda:0 is the first GPU")
    if device.type not in ("cpu", "cuda") and not _is_usable(device):
        raise ConfigError(f"there is no {device}; this machine has {', '.join(there)}", hint="leave the device out")
    return device


def _devices() -> list[str]:
    """The devices of this machine, as `--device` names them, GPUs with their models."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{number} ({torch.cuda.get_device_name(number)})" for number in range(count))]


def _is_usable(device: torch.device) -> bool:
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, NotImplementedError, AssertionError, ImportError):
        return False
    return True


@contextmanager
def join_ranks(device: str) -> Iterator[Ranks]:
    """Join the processes that torchrun or `--nproc` started; a single process is a group of its own.

    Raises:
        ConfigError: there are fewer GPUs than ranks, the device cannot train, or the environment variables are invalid.
        RanksError: another rank has ended, or does not respond.
    """
    own, chosen = rank_environment(), choose_device(device)
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"{chosen} cannot train: losses are added up in float64, which it lacks", hint="choose the device cpu")
    if own.world_size == 1:
        if chosen.type == "cuda" and chosen.index is not None:
            torch.cuda.set_device(chosen)  # events and streams are those of the current device unless told otherwise
        yield Ranks(0, 1, chosen)
        return
    if chosen.type == "cuda":
        count = torch.cuda.device_count()
        if own.local_world_size > count:  # the same on all ranks, so that rank 0 can report it
            raise ConfigError(
                f"{own.local_world_size} processes need {own.local_world_size} GPUs, but torch sees {count}",
                hint=f"use at most --nproc {count}",
            )
        chosen = torch.device("cuda", own.local_rank)
        torch.cuda.set_device(chosen)
    # First, because torch._dynamo, which an optimizer's first step imports, keeps any existing process group alive. The
    # threads of the group then outlive it, and a thread that needs the interpreter during its shutdown aborts the process.
    importlib.import_module("torch._dynamo")
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    seconds = timedelta(seconds=ranks_timeout())
    with _in_contact():
        store = open_store(own.rank, ranks_timeout())
        group = meet(store, own.rank, own.world_size, ranks_timeout())
        store = dist.PrefixStore(f"discern/{group}", store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=own.rank, world_size=own.world_size, timeout=seconds)
    waiting: list[Any] = []
    hosts: list[Any] = []
    closing: list[Callable[[], None]] = []
    try:
        with _in_contact():
            waiting.append(dist.new_group(backend="gloo", timeout=LONGEST_WORK))
            if backend != "gloo":
                hosts.append(dist.new_group(backend="gloo", timeout=seconds))
            heartbeat = _start_heartbeat(own.rank, own.world_size, group, waiting[0])
        with _watched(heartbeat), _in_contact(heartbeat):  # gradients are exchanged by torch itself
            yield Ranks(own.rank, own.world_size, chosen, waiting, hosts, heartbeat, closing)
    finally:
        # A remaining reference to the ranks must not keep the threads of the groups alive.
        waiting.clear()
        hosts.clear()
        for action in closing:
            action()
        dist.destroy_process_group()


def _start_heartbeat(rank: int, world_size: int, name: str, group: Any) -> Heartbeat:
    """Begin to show the other ranks of a group that this one is alive, and to watch them."""
    members: list[Any] = [None] * world_size
    dist.all_gather_object(members, Member.own(rank), group=group)
    heartbeat = Heartbeat(rank, members, name, heartbeat_timeout())
    dist.barrier(group=group)  # all are in the store
    heartbeat.start()
    return heartbeat


@contextmanager
def _watched(heartbeat: Heartbeat) -> Iterator[None]:
    """Tell the other ranks why this one ends, and stop watching."""
    try:
        yield
    except BaseException as problem:
        heartbeat.failed(problem)
        raise
    finally:
        heartbeat.close()


@contextmanager
def _in_contact(heartbeat: Heartbeat | None = None) -> Iterator[None]:
    """Turn torch's errors about a rank that has ended or does not respond into a RanksError that names it."""
    try:
        yield
    except RuntimeError as problem:
        if not _says_lost(problem):
            raise
        with stop_on_signals():  # torchrun is perhaps ending this process already; it still reports why
            reason = None if heartbeat is None else heartbeat.lost()
        if is_launched():
            raise SystemExit(LOST_CONTACT) from problem
        unknown = (
            f"another of the processes that train together has ended, or has not responded for {ranks_timeout():,.0f} seconds"
        )
        raise RanksError(reason or unknown, hint=LOST_HINT) from problem


def _says_lost(problem: RuntimeError) -> bool:
    said = str(problem).lower()
    lost = ("gloo", "nccl", "connection closed", "connection reset", "connection refused", "broken pipe", "timed out")
    return isinstance(problem, dist.DistError) or any(words in said for words in lost)
