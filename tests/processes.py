"""Python programs that begin at once: each is forked from a process that has imported torch and discern, which takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from torch.distributed import TCPStore

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["discern.cli.main", "discern.compare.run", "discern.pretraining.bench", "discern.pretraining.adapt"]
)


class Program:
    """A program with the interface of `subprocess.Popen`, whose output is text.

    Args:
        line: what follows `python` on a command line: `-m` and a module, `-c` and code, or a file; then its own arguments.
        variables: further variables of the environment.
    """

    def __init__(self, *line: str | Path, **variables: str) -> None:
        pipes = [FORKS.Pipe(duplex=False) for _ in ("stdout", "stderr")]
        arguments = ([*map(str, line)], os.environ | variables, *(writer for _, writer in pipes))
        self._process = FORKS.Process(target=_run, args=arguments)
        self._process.start()
        self.stdout, self.stderr = (os.fdopen(os.dup(reader.fileno()), encoding="utf-8") for reader, _ in pipes)
        for connection in (each for pipe in pipes for each in pipe):
            connection.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.kill = self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        with ThreadPoolExecutor() as threads:
            out, errors = (threads.submit(stream.read) for stream in (self.stdout, self.stderr))
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        return out.result(), errors.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()


def _run(line: list[str], environment: dict[str, str], out: Connection, errors: Connection) -> None:
    for number, (name, pipe) in enumerate((("stdout", out), ("stderr", errors)), 1):
        os.dup2(pipe.fileno(), number)
        setattr(sys, name, open(number, "w", buffering=1, closefd=False))  # noqa: SIM115 (open until the process ends)
    os.environ.clear()
    os.environ.update(environment)
    kind, *arguments = line if line[0] in ("-c", "-m") else ["file", *line]
    sys.argv = arguments
    if kind == "-c":
        exec(arguments[0], {"__name__": "__main__"})
    elif kind == "-m":
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


@contextmanager
def ranks(count: int, *line: str | Path, **variables: str) -> Iterator[list[Program]]:
    """Programs that train together, of which rank 0 keeps the store; they are killed at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])} | variables
    programs = [Program(*line, **shared, RANK=str(rank)) for rank in range(count)]
    try:
        yield programs
    finally:
        for program in programs:
            program.kill()
            program.wait()


def run_ranks(count: int, *line: str | Path) -> None:
    """Run a program on so many processes, until all have ended well. The store is kept for them, as torchrun does."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with ThreadPoolExecutor(count) as threads, ranks(count, *line, **variables) as programs:
        outputs = {threads.submit(program.communicate, 400): program for program in programs}
        for ended in as_completed(outputs):
            assert outputs[ended].returncode == 0, ended.result()[1][-3000:]
