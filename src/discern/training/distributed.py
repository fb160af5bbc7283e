"""Ranks of distributed training: sums and gathers over all of them."""

from __future__ import annotations

import importlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor

from discern.config.schema import flatten
from discern.errors import ConfigError, DataError, DiscernError, RanksError
from discern.training.heartbeat import LOST_HINT, Heartbeat, Member
from discern.training.interrupt import stop_on_signals
from discern.training.rank_environment import heartbeat_timeout, rank_environment, ranks_timeout
from discern.training.rendezvous import open_store, rendezvous

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
        group = rendezvous(store, own.rank, own.world_size, ranks_timeout())
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
        if reason == "":
            raise SystemExit(1) from problem
        unknown = (
            f"another of the processes that train together has ended, or has not responded for {ranks_timeout():,.0f} seconds"
        )
        raise RanksError(reason or unknown, hint=LOST_HINT) from problem


def _says_lost(problem: RuntimeError) -> bool:
    said = str(problem).lower()
    lost = ("gloo", "nccl", "connection closed", "connection reset", "connection refused", "broken pipe", "timed out")
    return isinstance(problem, dist.DistError) or any(words in said for words in lost)


_SHOWN = 3
# Network file systems cache the names in a folder for some seconds.
_PATIENCE = 15.0
_LOOK = 0.2
# Agents of torchrun that meet by c10d note their signs of life by their own clocks, and compare those of others with their own.
# One that is this old (five seconds, three times) counts as dead: torch/distributed/elastic/rendezvous/dynamic_rendezvous.py.
_MOST_APART = 15.0


def check_ranks(ranks: Ranks, folder: Path, config: BaseModel, **others: str) -> None:
    """Check that all ranks are about to train the same `config` into the same `folder`.

    Args:
        others: what else they must agree on, by name, such as the fingerprint of the data set.

    Raises:
        ConfigError, DataError: as `check_agreement`, `check_clocks` and `check_shared`; nothing has been written.
    """
    if ranks.world_size == 1:
        return
    check_agreement(ranks, facts_of(config, **others))
    check_clocks(ranks)
    check_shared(ranks, folder)


def facts_of(config: BaseModel, **others: str) -> dict[str, str]:
    """What all ranks must agree on: every setting by its dotted key, and others, such as the fingerprint of the data set."""
    settings = {key: json.dumps(value, default=str, sort_keys=True) for key, value in flatten(config).items()}
    return {name.replace("_", " "): value for name, value in others.items()} | settings


def check_agreement(ranks: Ranks, facts: Mapping[str, str]) -> None:
    """Check that all ranks have the same facts, such as the fingerprint of their data set.

    Args:
        facts: what this rank has, by the name to show.

    Raises:
        ConfigError: a rank differs from rank 0, on every rank; the message names it and its machine.
    """
    gathered: list[tuple[str, dict[str, str]]] = ranks.gather((socket.gethostname(), dict(facts)))
    host, first = gathered[0]
    for rank, (other_host, other) in enumerate(gathered):
        differing = [name for name in sorted(first.keys() | other.keys()) if first.get(name) != other.get(name)]
        if not differing:
            continue
        lines = [f"  {name}: {first.get(name)} in process 0, {other.get(name)} in process {rank}" for name in differing[:_SHOWN]]
        more = [f"  and {len(differing) - _SHOWN} more"] if len(differing) > _SHOWN else []
        raise ConfigError(
            "\n".join([f"process {rank} on {other_host} differs from process 0 on {host}:", *lines, *more]),
            hint="start all processes with the same command, on the same data set and version of discern",
        )


def check_same_start(ranks: Ranks, step: int | None) -> None:
    """Check that all ranks continue from the same checkpoint: one that does not see the newest would take an earlier one.

    Args:
        step: step that this rank continues from; None if it found no checkpoint.

    Raises:
        DataError: a rank differs from rank 0, on every rank; the message names it and its machine.
    """
    if ranks.world_size == 1:
        return
    gathered: list[tuple[str, int | None]] = ranks.gather((socket.gethostname(), step))
    for rank, (host, other) in enumerate(gathered):
        if other != gathered[0][1]:
            found = ["no checkpoint" if each is None else f"the checkpoint of step {each:,}" for each in (other, gathered[0][1])]
            raise DataError(
                f"process {rank} on {host} found {found[0]}, but process 0 on {gathered[0][0]} {found[1]}",
                hint="start all processes again: a network file system may show new files some seconds late",
            )


def check_clocks(ranks: Ranks, now: Callable[[], float] = time.time) -> None:
    """Check that the clocks of all ranks agree.

    Args:
        now: the clock of this rank, in seconds.

    Raises:
        ConfigError: a clock differs by more than 15 seconds from that of rank 0, on every rank; the message names the machine.
    """
    # Each rank reads its clock, learns of the others, and reads it again: any first reading was earlier than any second one. Of
    # two clocks, the difference of these is therefore the least that one is ahead, however long a rank was held up.
    first: list[float] = ranks.gather(now())
    second: list[tuple[str, float]] = ranks.gather((socket.gethostname(), now()))
    for rank, (host, later) in enumerate(second):
        ahead, behind = first[rank] - second[0][1], first[0] - later
        if max(ahead, behind) > _MOST_APART:
            raise ConfigError(
                f"the clock of process {rank} on {host} is at least {max(ahead, behind):,.0f} seconds "
                f"{'ahead of' if ahead > behind else 'behind'} that of process 0 on {second[0][0]}",
                hint="set the clocks of all machines by NTP (`timedatectl` shows whether they are): torchrun considers a machine "
                f"dead if its clock differs by more than {_MOST_APART:.0f} seconds",
            )


def check_shared(ranks: Ranks, folder: Path) -> None:
    """Check that all ranks see what rank 0 writes where the output will be. Nothing remains of the check.

    Args:
        folder: output folder, which need not exist.

    Raises:
        ConfigError: a rank does not see it, on every rank; the message names it and its machine.
        DataError: rank 0 cannot write there.
    """
    if ranks.world_size == 1:
        return
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    name = f".discern-shared-{secrets.token_hex(8)}"
    mark: Path = ranks.gather(place / name if ranks.writes else None)[0]
    try:
        ranks.run_on_rank_zero(lambda: _write(mark))
        seen: list[tuple[str, bool]] = ranks.gather((socket.gethostname(), _appears(mark)))
    finally:
        if ranks.writes:
            mark.unlink(missing_ok=True)
    for rank, (host, visible) in enumerate(seen):
        if not visible:
            raise ConfigError(
                f"process {rank} on {host} does not see what process 0 on {seen[0][0]} writes to {mark.parent}: the folder is "
                f"not the same on both machines",
                hint="set --out to a folder on storage that all machines share, such as NFS or Lustre",
            )


def _write(mark: Path) -> None:
    try:
        mark.touch()
    except OSError as problem:
        raise DataError(f"{mark.parent} cannot be written: {problem.strerror}", hint="choose another --out") from problem


def _appears(mark: Path) -> bool:
    deadline = time.monotonic() + _PATIENCE
    while not _is_listed(mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK)
    return True


def _is_listed(mark: Path) -> bool:
    # The names are read anew: that a file is absent may be remembered by a network file system.
    try:
        return any(each.name == mark.name for each in mark.parent.iterdir())
    except OSError:
        return False
