"""This process's place among those that train together, as torchrun and `--nproc` say it in the environment."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass

from discern.errors import ConfigError

LIFELINE = "DISCERN_LIFELINE"
"""Environment variable of the processes of `--nproc`: number of the descriptor of a pipe that ends when the launcher does."""

LOST_CONTACT = 76
"""Exit code of one of them that lost contact with the others; the launcher knows why and says so."""

PATIENCE = "DISCERN_RANKS_TIMEOUT"
"""Environment variable: seconds after which a process that does not answer is given up."""

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_ALONE = f"unset {' '.join(_NEEDED)}"


@dataclass(frozen=True)
class Place:
    """Which of several processes this is.

    Attributes:
        rank: number of this process, from 0.
        world: how many there are.
        local_rank: number among those on this machine.
        local_world: how many of them are on this machine.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int


ALONE = Place(0, 1, 0, 1)


def place() -> Place:
    """The place that the environment gives this process; alone where it does not give one completely.

    RANK or WORLD_SIZE by themselves mean nothing: on some clusters every process has them.

    Raises:
        ConfigError: the variables are all there, but do not make sense.
    """
    if not all(os.environ.get(name) for name in _NEEDED):
        return ALONE
    world, rank = _number("WORLD_SIZE", 1), _number("RANK", 0)
    if rank >= world:
        raise ConfigError(
            f"the environment has RANK={rank} and WORLD_SIZE={world}: ranks are numbered from 0 to {world - 1}",
            hint=f"start it with torchrun or --nproc, or alone: {_ALONE}",
        )
    local_world = _number("LOCAL_WORLD_SIZE", 1) if os.environ.get("LOCAL_WORLD_SIZE") else 1
    local_rank = _number("LOCAL_RANK", 0) if os.environ.get("LOCAL_RANK") else 0
    return ALONE if world == 1 else Place(rank, world, local_rank, max(local_world, local_rank + 1))


def refuse_ranks(what: str) -> None:
    """Raise where torchrun started several processes for what one does.

    Raises:
        ConfigError: so it is.
    """
    if place().world > 1:
        raise ConfigError(
            f"{what} runs in one process, but the environment sets up several", hint=f"start it as a single process: {_ALONE}"
        )


def missing_of_place() -> list[str]:
    """What the environment lacks of a place, where it names some of it; nothing where it names all or none."""
    found = [name for name in ("RANK", "WORLD_SIZE") if os.environ.get(name)]
    missing = [name for name in _NEEDED if not os.environ.get(name)]
    return missing if found else []


def is_launched() -> bool:
    """Whether `--nproc` started this process."""
    return LIFELINE in os.environ


def patience() -> float:
    """Seconds that a process waits for the others in the middle of a step: 10 minutes, or what the environment says.

    Raises:
        ConfigError: it says no such number.
    """
    found = os.environ.get(PATIENCE, "600")
    try:
        seconds = float(found)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"the environment has {PATIENCE}={found!r}, expected seconds above 0", hint=f"unset {PATIENCE}")
    return seconds


def follow_launcher() -> None:
    """Have this process stop, as by SIGTERM, when the launcher that started it has ended in whatever way."""
    if not is_launched():
        return
    pipe = int(os.environ[LIFELINE])

    def wait() -> None:
        try:
            while os.read(pipe, 1):
                pass
        except OSError:  # this process was started by another that only inherited the variable
            return
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def _number(name: str, least: int) -> int:
    value = os.environ[name]
    if not value.isdecimal() or int(value) < least:
        raise ConfigError(
            f"the environment has {name}={value!r}, expected an integer of at least {least}",
            hint=f"start it with torchrun or --nproc, or alone: {_ALONE}",
        )
    return int(value)
