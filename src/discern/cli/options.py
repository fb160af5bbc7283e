"""Options that several verbs share, and how they are read."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from discern.config.layers import preset_names
from discern.data.processes import available_cores
from discern.errors import ConfigError, RanksError
from discern.training.interrupt import handled
from discern.training.rank_environment import NPROC_RUN, rank_environment, ranks_timeout


def _presets(incomplete: str) -> list[str]:
    """Names of presets for shell completion."""
    return [name for name in preset_names() if name.startswith(incomplete)]


ScoringModelArgument: TypeAlias = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A run, an export, or any Hugging Face ELECTRA, BERT, XLNet or ModernBERT with its pre-training head (folder or "
        "name on the Hub).",
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


def refuse_text_as_file(file: Path | None) -> None:
    """Raise a ConfigError for a sentence that stands in place of a file."""
    if file is not None and " " in str(file).strip() and not file.exists():
        raise ConfigError(f"there is no file '{file}'", hint=f"to give a text itself: --text {shlex.quote(str(file))}")


def typed_text(text: str, name: str) -> str:
    """A text from the command line, checked to be UTF-8, because a shell passes bytes.

    Args:
        name: name of the argument, for the message.

    Raises:
        ConfigError: the text is not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        byte = os.fsencode(text[problem.start])[0] if 0xDC80 <= ord(text[problem.start]) <= 0xDCFF else 0
        raise ConfigError(
            f"{name} is not UTF-8: byte 0x{byte:02x} at character {problem.start + 1}",
            hint="if the terminal uses another encoding, save the text to a file and convert it with iconv",
        ) from problem
    return text


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
