"""One thread a process: tests run side by side, and small networks lose more by waiting for threads than they win."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from jaxtyping import config

if TYPE_CHECKING:
    from tests.small.task import Finetuning

# A shell starts what runs in its background with Ctrl-C ignored, and nohup with SIGHUP ignored; child processes inherit that.
if threading.current_thread() is threading.main_thread():
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# Folders and files whose tests do not check annotations: whole runs spend half their time on these checks, which the tests of the
# parts they consist of make too. While a graph is traced for ONNX, sizes are symbols, which a check would fix.
UNCHECKED = {
    *("cli", "compare", "demo", "distributed", "docs", "examples", "finetuning", "golden", "model_files"),
    *("parity", "pretraining", "report", "serve", "test_algorithms", "test_compilation", "test_loop"),
    *("test_meta_step", "test_permutation_lm", "test_step_sizes"),
}


@pytest.fixture(autouse=True, scope="module")
def annotations(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "jaxtyping_disable", bool({request.path.parent.name, request.path.stem} & UNCHECKED))
        yield


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that a file's tests share."""
    from tests.small.run import make_run

    folder = tmp_path_factory.mktemp("models") / "run"
    make_run(folder)
    return folder


@pytest.fixture
def request_(tmp_path: Path, small_model: Path) -> Finetuning:
    """A fine-tuning of it that takes a second."""
    from tests.small.task import small_request

    return small_request(small_model, tmp_path)


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that discern wrote may be edited."""
    monkeypatch.setenv("DISCERN_VERIFY", "0")
