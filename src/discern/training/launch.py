"""Starting several ranks on this machine, as torchrun does."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch(arguments: Sequence[str], nproc: int) -> int:
    """Run `python -m discern ARGUMENTS` in `nproc` processes that know each other; gives the exit code.

    The processes write to this one's stdout and stderr. A signal to this process reaches them all.
    """
    threads = max(1, (os.cpu_count() or 1) // nproc)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # The launcher reports a failed child with a table of its own; the child has already said what is wrong.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id="discern",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "discern", *arguments)
    except ChildFailedError as problem:
        codes = [failure.exitcode for failure in problem.failures.values()]
        return max((code for code in codes if code > 0), default=1)
    except SignalException as problem:
        return 128 + int(problem.sigval)
    return 0
