"""Checks before distributed training that all ranks agree: on data, settings and time, and on one shared folder."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import BaseModel

from discern.config.tree import flatten
from discern.errors import ConfigError, DataError
from discern.training.parallel import Ranks

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
