"""Options that several verbs share, and how they are read."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from discern.config.layers import preset_names
from discern.data.executors import available_cores
from discern.errors import ConfigError, RanksError
from discern.training.interrupt import handled
from discern.training.rank_environment import NPROC_RUN, rank_environment, ranks_timeout


def _presets(incomplete: str) -> list[str]:
    """Names of presets for shell completion."""
    return [name for name in preset_names() if name.startswith(incomplete)]


FOREIGN = "a Hugging Face ELECTRA, BERT, XLNet or ModernBERT (folder or name on the Hub)"
ScoringModelArgument: TypeAlias = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help=f"A run, an export, or {FOREIGN} with its pre-training head.",
    ),
]
ConfigArgument: TypeAlias = Annotated[
    Path | None,
    typer.Argument(
        metavar="CONFIG.toml",
        help="Configuration file, which overrides the preset; or the folder of a run, to use its configuration.",
        show_default=False,
    ),
]
PresetOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--preset", metavar="NAME", help="Preset to start from; 'discern config presets' lists them.", autocompletion=_presets
    ),
]
DataTemperatureOption: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--data-temperature",
        metavar="T",
        min=0.1,
        help="Without weights, a data set of n tokens has the share p ~ n^(1/T). 1 is by size; larger values favor small data "
        "sets, such as languages with little text (mT5, XLM-R: 3.3). [default: 1]",
    ),
]
SetOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.KEY=VALUE", help="Set a value; overrides preset and file. May be repeated.", show_default=False
    ),
]
ScorerOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--scorer",
        metavar="NAME",
        help="Scorer: electric, rtd, pll, pll-word-l2r, two-tower, inversion or permutation-lm. Default: depends on the model.",
        show_default=False,
    ),
]
DeviceOption: TypeAlias = Annotated[str, typer.Option("--device", help="Device to use: auto, cpu, cuda, cuda:1, ...")]
NprocOption: TypeAlias = Annotated[
    int, typer.Option("--nproc", min=1, help="Number of processes to start on this machine, usually one per GPU.")
]
HostOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--host",
        metavar="ADDRESS",
        help="Address to listen on. With 0.0.0.0, other machines can connect, and every request needs a token.",
    ),
]
NameOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--name", metavar="HOST", help="Host name that browsers may use to reach the server; may be repeated.", show_default=False
    ),
]


PortOption: TypeAlias = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0: any free port.")]
ResumeOption: TypeAlias = Annotated[
    Literal["auto", "never", "must"],
    typer.Option(
        "--resume",
        help="What to do if --out holds a run. auto: continue it; never: move it aside and start over; must: continue it, "
        "and fail if there is none.",
    ),
]


def refuse_together(option: str, others: Mapping[str, bool]) -> None:
    """Raise a ConfigError for options that were given although they have no effect with another one.

    Args:
        others: whether each of these options was given.
    """
    given = " and ".join(name for name, is_given in others.items() if is_given)
    if given:
        raise ConfigError(f"{given} cannot be combined with {option}", hint=f"leave out {given}")


@contextmanager
def server_extra(verb: str) -> Iterator[None]:
    """Import the packages of the extra `serve`.

    Raises:
        ConfigError: one of them is not installed.
    """
    try:
        yield
    except ImportError as problem:
        if (problem.name or "").partition(".")[0] not in ("starlette", "uvicorn", "anyio", "h11"):
            raise
        raise ConfigError(
            f"discern {verb} needs the package {problem.name}, which is not installed", hint="pip install 'discern-nlp[serve]'"
        ) from problem


def launch_ranks(nproc: int, check: Callable[[], object] = lambda: None) -> None:
    """Start the processes of `--nproc` as torchrun does on one machine, and exit with their code; return in each of them.

    SIGINT, SIGTERM and SIGHUP are passed on to the processes, which save and stop. If one fails, the others are stopped.

    Args:
        check: checks the settings before the processes are started.

    Raises:
        RanksError: a process was killed.
    """
    if nproc == 1 or rank_environment().world_size > 1:
        return
    check()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    from discern.training.heartbeat import FENCED

    logging.disable()  # the processes report their errors; torch would repeat them with a traceback
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # without stack traces about a connection that is closed
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // nproc)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=f"{NPROC_RUN}{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        signals_to_handle=",".join(signal.Signals(number).name for number in handled()),
        shutdown_timeout=int(ranks_timeout()),  # saving may take that long
    )
    try:
        launch_agent(config, sys.executable, ["-m", "discern", *without_nproc(sys.argv[1:])])
    except ChildFailedError as problem:
        # Torch stops the others (SIGTERM) when one process has ended; what ended that one counts.
        codes = {rank: failure.exitcode for rank, failure in problem.failures.items()}
        first = {rank: code for rank, code in codes.items() if code not in (-signal.SIGTERM, 128 + signal.SIGTERM)} or codes
        # A process that failed has said why; so have those that ended one which had shown no sign of life.
        if max(first.values()) < 0 and -FENCED not in first.values():
            failure = problem.failures[min(first)]
            raise RanksError(
                f"rank {min(first)} (pid {failure.pid} on {socket.gethostname()}) was killed by {failure.signal_name()}",
                hint="the system does this when memory runs out; the same command continues from the last checkpoint",
            ) from None
        raise SystemExit(max(1, *first.values())) from None
    except SignalException as problem:
        raise SystemExit(128 + problem.sigval) from None
    raise SystemExit(0)


def without_nproc(arguments: list[str]) -> list[str]:
    """The command line of each process: the arguments without --nproc."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip or argument.startswith("--nproc="):
            skip = False
        elif argument == "--nproc":
            skip = True
        else:
            kept.append(argument)
    return kept
