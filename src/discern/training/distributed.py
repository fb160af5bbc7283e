"""The device of this process, and its rank among those of distributed training: sums and gathers over all of them."""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import secrets
import socket
import sys
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
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from discern.config.schema import flatten
from discern.errors import ConfigError, DataError, DiscernError, RanksError
from discern.training.config import TrainConfig
from discern.training.device import best_device, gpu_names
from discern.training.heartbeat import LEAVES_THE_REPORT, LOST_HINT, Heartbeat, Member
from discern.training.process import heartbeat_timeout, rank_environment, ranks_timeout, stop_on_signals

# Rank 0 may predict large files or write to a slow disk while the others wait.
LONGEST_WORK = timedelta(hours=24)
_SHOWN = 3
_INTERVAL = 0.1  # seconds between two looks at the store
_CHECK = "look for its message, and check that every machine was started with the same address, port and number of machines"
# Network file systems cache the names in a folder for some seconds.
_PATIENCE = 15.0


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together.

    Attributes:
        rank: number of this process; rank 0 writes.
        world_size: number of processes.
        device: device on which this process computes.
        groups: process groups by use. In 'long' the others wait for work of rank 0, for at most `LONGEST_WORK`; 'hosts' exchanges
            numbers that the hosts know. In all but 'long', a rank that does not respond is lost after `ranks_timeout()` seconds.
        heartbeat: knows which process is lost, when an exchange fails.
    """

    rank: int
    world_size: int
    device: torch.device
    groups: dict[str, Any] = field(default_factory=dict)
    heartbeat: Heartbeat | None = None

    @property
    def reads_freely(self) -> bool:
        """Whether the host may read values of the device after every step: of the CPU, which it is, and of Apple's GPUs."""
        return self.device.type in ("cpu", "mps")

    @property
    def writes(self) -> bool:
        """Whether this process writes files: True on rank 0."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Sum each value over all ranks, in float64. Waits for the other ranks, but for no device."""
        if self.world_size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        with _name_lost_ranks(self.heartbeat):
            dist.all_reduce(total, group=self.groups["hosts"])
        return list(map(float, total.tolist()))

    def sum_tensor(self, values: Tensor) -> Tensor:
        """Sum a tensor over all ranks."""
        if self.world_size == 1:
            return values
        total = values.to(self.device, copy=True)
        with _name_lost_ranks(self.heartbeat):
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
        with _name_lost_ranks(self.heartbeat):
            dist.all_gather_object(gathered, value, group=self.groups["long"] if waits else None)
        return gathered

    def gather_first(self, value: Any) -> list[Any]:
        """Return the values of all ranks in order on rank 0, and an empty list on the others."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] | None = [None] * self.world_size if self.writes else None
        with _name_lost_ranks(self.heartbeat):
            dist.gather_object(value, gathered)
        return gathered or []

    def run_on_rank_zero(self, action: Callable[[], None]) -> None:
        """Run an action on rank 0 only, for folders that the others might see half written.

        Raises:
            DiscernError, OSError: the error that `action` raised, on every rank.
        """
        problem: DiscernError | OSError | None = None
        if self.writes:
            try:
                action()
            except (DiscernError, OSError) as error:
                problem = error
        (problem, *_) = self.gather(problem, waits=True)
        if problem is not None:
            raise problem

    def barrier(self) -> None:
        """Wait for all ranks, including work that rank 0 does alone."""
        if self.world_size > 1:
            with _name_lost_ranks(self.heartbeat):
                dist.barrier(group=self.groups["long"])


def choose_device(name: str) -> torch.device:
    """Return the device of this name; 'auto' chooses a GPU if there is one, NVIDIA's or AMD's before Apple's.

    Raises:
        ConfigError: the machine has no such device.
    """
    if name == "auto":
        name = best_device()
    if name == "meta":
        raise ConfigError(
            "device 'meta' computes no numbers, so nothing can be trained on it",
            hint="use cpu, cuda or mps; `discern bench --device meta` counts the FLOPs and the memory of a training step",
        )
    try:
        device = torch.device(name)
        if device.type == "cuda" and (device.index or 0) >= (count := torch.get_device_module(device).device_count()):
            raise RuntimeError(f"torch sees {count} GPUs for CUDA or ROCm")
        if device.type not in ("cpu", "cuda"):
            torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as problem:
        raise ConfigError(
            f"there is no device '{name}'; this machine has {', '.join(['cpu', *gpu_names()])}",
            hint="choose auto, cpu, cuda, cuda:1 or mps; if a GPU is missing, see `nvidia-smi` and `discern doctor`",
        ) from problem
    return device


@contextmanager
def join_ranks(device: str) -> Iterator[Ranks]:
    """Join the processes that torchrun or `--nproc` started; a single process is a group of its own.

    Raises:
        ConfigError: there are fewer GPUs than ranks, the device cannot train, or the environment variables are invalid.
        RanksError: another rank has ended, or does not respond.
    """
    environment, chosen = rank_environment(), choose_device(device)
    able = ("cpu", "cuda", "mps") if environment.world_size == 1 else ("cpu", "cuda")
    if chosen.type not in able:
        where = "" if environment.world_size == 1 else " in several processes"
        raise ConfigError(f"{chosen} cannot train{where}", hint=f"choose the device {' or '.join(able)}")
    if environment.world_size == 1:
        if chosen.type == "cuda" and chosen.index is not None:
            # Events and streams are those of the current device unless told otherwise.
            torch.get_device_module(chosen).set_device(chosen)
        yield Ranks(0, 1, chosen)
        return

    # Choose a GPU for each process
    rank, world_size, local_size = environment.rank, environment.world_size, environment.local_world_size
    if chosen.type == "cuda":
        count = torch.get_device_module(chosen).device_count()
        if local_size > count:  # the same on all ranks, so that rank 0 can report it
            raise ConfigError(
                f"{local_size} processes need {local_size} GPUs, but torch sees {count}", hint=f"use at most --nproc {count}"
            )
        chosen = torch.device("cuda", environment.local_rank)
        torch.get_device_module(chosen).set_device(chosen)

    # Create the default process group. torch._dynamo, which an optimizer's first step imports, comes first, because it keeps
    # any existing group alive. The threads of the group then outlive it, and a thread that needs the interpreter during its
    # shutdown aborts the process.
    importlib.import_module("torch._dynamo")
    backend, timeout = "nccl" if chosen.type == "cuda" else "gloo", timedelta(seconds=ranks_timeout())
    with _name_lost_ranks():
        store = open_store(rank, ranks_timeout())
        name = rendezvous(store, rank, world_size, ranks_timeout())
        store = dist.PrefixStore(f"discern/{name}", store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    groups: dict[str, Any] = {}
    try:
        # Create the other groups, and watch the other ranks
        with _name_lost_ranks():
            groups["long"] = dist.new_group(backend="gloo", timeout=LONGEST_WORK)
            groups["hosts"] = None if backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
            members: list[Any] = [None] * world_size
            dist.all_gather_object(members, Member.own(rank), group=groups["long"])
            heartbeat = Heartbeat(rank, members, name, heartbeat_timeout())
            dist.barrier(group=groups["long"])  # all are in the store
            heartbeat.start()
        try:
            with _name_lost_ranks(heartbeat):  # gradients are exchanged by torch itself
                yield Ranks(rank, world_size, chosen, groups, heartbeat)
        except BaseException as problem:
            heartbeat.failed(problem)
            raise
        finally:
            heartbeat.close()
    finally:
        # Neither remaining references to the ranks nor the caches of DTensor may keep the threads of the groups alive.
        groups.clear()
        gc.collect()
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()
        dist.destroy_process_group()


def open_store(rank: int, seconds: float) -> Any:
    """The store at the address in the environment. Rank 0 creates it, unless torchrun or `--nproc` has.

    torch's own function waits where no signal reaches Python, and torchrun has to kill the process.

    Args:
        seconds: how long to wait for the store, and later for an answer of it.

    Raises:
        ConfigError: the port in the environment is not a number.
        RanksError: there is no store in time.
    """
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isdecimal() or int(port) >= 1 << 16:
        raise ConfigError(f"the environment has MASTER_PORT={port!r}, expected a port below 65536", hint=_CHECK)
    creates = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    deadline = time.monotonic() + seconds
    while not creates:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            break
        except OSError as problem:
            if time.monotonic() > deadline:
                raise RanksError(
                    f"rank 0, or torchrun on its machine, did not answer on {host}:{port} in {seconds:,.0f} seconds: {problem}",
                    hint=_CHECK,
                ) from problem
        time.sleep(_INTERVAL)
    timeout = timedelta(seconds=seconds)
    return TCPStore(host, int(port), is_master=creates, timeout=timeout, wait_for_workers=False, multi_tenant=True)


def rendezvous(store: Any, rank: int, world_size: int, seconds: float) -> str:
    """Wait until all processes are there. Return the name of their group, which no earlier group has had.

    torchrun may keep one store over all restarts, with what dead processes have left in it. So rank 0 publishes a random name,
    every process answers with the newest name and a token of its own, and the group is complete when rank 0 has listed the
    tokens of all that answered its name.

    Args:
        store: store that all of them see, see `open_store`.
        seconds: how long to wait.

    Raises:
        RanksError: not all processes have come in time.
    """
    group, token = os.urandom(8).hex(), os.urandom(8).hex()
    answers = [f"discern/answer/{number}" for number in range(world_size)]
    if rank == 0:
        store.set("discern/name", group)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if store.check(["discern/name"]):
            name = store.get("discern/name").decode()
            store.set(answers[rank], f"{name} {token}")
            answered = [store.get(key).decode() if store.check([key]) else "" for key in answers] if rank == 0 else []
            if answered and all(answer.startswith(group) for answer in answered):
                store.set(f"discern/members/{name}", " ".join(answered))
            if store.check([f"discern/members/{name}"]) and token in store.get(f"discern/members/{name}").decode():
                return str(name)
        time.sleep(_INTERVAL)
    missing = [str(number) for number, answer in enumerate(answered) if not answer.startswith(group)] if rank == 0 else []
    who = f"rank {', '.join(missing)} of {world_size}" if missing else "one of the processes that train together"
    raise RanksError(f"{who} did not join within {seconds:,.0f} seconds", hint=_CHECK)


@contextmanager
def _name_lost_ranks(heartbeat: Heartbeat | None = None) -> Iterator[None]:
    """Turn torch's errors about a rank that has ended or does not respond into a RanksError that names it."""
    try:
        yield
    except RuntimeError as problem:
        words = ("gloo", "nccl", "connection closed", "connection reset", "connection refused", "broken pipe", "timed out")
        if not isinstance(problem, dist.DistError) and not any(word in str(problem).lower() for word in words):
            raise
        with stop_on_signals():  # torchrun is perhaps ending this process already; it still reports why
            reason = None if heartbeat is None else heartbeat.lost()
        if reason == "":
            raise SystemExit(LEAVES_THE_REPORT) from problem
        unknown = f"another training process has ended, or has not responded for {ranks_timeout():,.0f} seconds"
        raise RanksError(reason or unknown, hint=LOST_HINT) from problem


def check_ranks(ranks: Ranks, folder: Path, config: BaseModel, **others: str) -> None:
    """Check that all ranks are about to train the same `config` into the same `folder`, and see the same files there.

    Args:
        folder: output folder, which need not exist. Nothing remains of the check.
        others: what else they must agree on, by name, such as the fingerprint of the data set.

    Raises:
        ConfigError: a rank differs from rank 0, on every rank; the message names it and its machine.
        DataError: rank 0 cannot write to the folder.
    """
    if ranks.world_size == 1:
        return
    # Settings and data
    settings = {key: json.dumps(value, default=str, sort_keys=True) for key, value in flatten(config).items()}
    check_consistency(ranks, {name.replace("_", " "): value for name, value in others.items()} | settings)

    # The folder: all ranks must see what rank 0 writes where the output will be.
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    mark: Path = ranks.gather(parent / f".discern-shared-{secrets.token_hex(8)}")[0]

    try:
        ranks.run_on_rank_zero(mark.touch)
        deadline = time.monotonic() + _PATIENCE
        # The names are listed anew: a network file system may remember that a file is absent.
        while not (visible := mark.parent.is_dir() and mark.name in os.listdir(mark.parent)) and time.monotonic() < deadline:
            time.sleep(0.2)
        check_consistency(
            ranks,
            {f"sees what process 0 writes to {mark.parent}": "yes" if visible else "no"},
            hint="set --out to a folder on storage that all machines share, such as NFS or Lustre",
        )
    except OSError as problem:
        raise DataError(f"{mark.parent} cannot be written: {problem.strerror}", hint="choose another --out") from problem
    finally:
        if ranks.writes:
            mark.unlink(missing_ok=True)


def check_consistency(
    ranks: Ranks,
    facts: Mapping[str, str],
    *,
    hint: str = "start all processes with the same command, on the same data set and version of discern",
    error: type[DiscernError] = ConfigError,
) -> None:
    """Check that all ranks have the same facts, such as the fingerprint of their data set.

    Args:
        facts: what this rank has, by the name to show.
        hint: what to do if a rank differs.
        error: error to raise.

    Raises:
        DiscernError: a rank differs from rank 0, on every rank; the message names it and its machine.
    """
    gathered: list[tuple[str, dict[str, str]]] = ranks.gather((socket.gethostname(), dict(facts)))
    host, first = gathered[0]
    for rank, (other_host, other) in enumerate(gathered):
        differing = [name for name in sorted(first.keys() | other.keys()) if first.get(name) != other.get(name)]
        if differing:
            lines = [f"  {name}: {first.get(name)} in process 0, {other.get(name)} in process {rank}" for name in differing]
            title = f"process {rank} on {other_host} differs from process 0 on {host}:"
            raise error("\n".join([title, *lines[:_SHOWN]]), hint=hint)


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes so far: of tensors on a GPU of CUDA or ROCm, or else of the whole process."""
    if device.type == "cuda":
        return int(torch.get_device_module(device).max_memory_allocated(device))
    if sys.platform == "linux":
        # getrusage would include the peak of the process that started this one.
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def explain_lack_of_memory(train: TrainConfig, ranks: Ranks, where: Callable[[], str] = str) -> Iterator[None]:
    """A context in which an error of a device, or a machine, without memory says how many rows a step had.

    Args:
        where: returns the beginning of the message, such as the number of the step.

    Raises:
        ConfigError: a step does not fit into memory.
    """
    try:
        yield
    except RuntimeError as problem:
        if not isinstance(problem, torch.OutOfMemoryError) and "can't allocate memory" not in str(problem):
            raise
        rows = train.micro_batch_size or train.sequences_per_step // ranks.world_size
        smaller = f"--set train.micro_batch_size={rows // 2}, which computes each step in smaller batches, or " * (rows > 1)
        raise ConfigError(
            f"{where()}there is not enough memory on {ranks.device} for {rows:,} rows at once",
            hint=f"{smaller}--set train.gradient_checkpointing=true, a shorter data.sequence_length, or a smaller model",
        ) from problem
