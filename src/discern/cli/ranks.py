"""`--nproc`: the processes of one machine that train together."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys

from discern.data.executors import available_cores
from discern.errors import RanksError
from discern.training.process import NPROC_RUN, handled, ranks_timeout


def launch_ranks(nproc: int) -> None:
    """Start the processes of `--nproc` as torchrun does on one machine, and exit with their code.

    SIGINT, SIGTERM and SIGHUP are passed on to the processes, which save and stop. If one fails, the others are stopped.

    Raises:
        RanksError: a process was killed.
    """
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
        launch_agent(config, sys.executable, ["-m", "discern", *sys.argv[1:]])
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
