"""A served run and a served fine-tuned model, small ones."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn

from discern.serve.app import serve_application
from discern.serve.model import ServedModel, load_served
from discern.serve.server import Limits, bind, run


@pytest.fixture(scope="package")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.small.run import make_run

    folder = tmp_path_factory.mktemp("served") / "a run"
    make_run(folder)
    return folder


@pytest.fixture(scope="package")
def tuned_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.small.finetuned import SINGLE, make_finetuned

    return make_finetuned(tmp_path_factory.mktemp("served") / "tuned", own=SINGLE)


@pytest.fixture(scope="package")
def served(run_folder: Path) -> ServedModel:
    return load_served(run_folder, device="cpu", warn=lambda message: None)


@pytest.fixture(scope="package")
def tuned(tuned_folder: Path) -> ServedModel:
    return load_served(tuned_folder, device="cpu", warn=lambda message: None)


@dataclass(frozen=True)
class Running:
    """A server on a real socket."""

    port: int

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)


@contextmanager
def running(models: list[ServedModel], limits: Limits = Limits()) -> Iterator[Running]:
    """A server in a thread of this process."""
    address = bind("127.0.0.1", 0)
    app, batcher = serve_application(models, address.access, limits, print)
    servers: list[uvicorn.Server] = []
    thread = threading.Thread(target=run, args=(app, address, limits, servers.append), daemon=True)
    thread.start()
    assert wait_until(lambda: servers)
    try:
        yield Running(address.port)
    finally:
        servers[0].should_exit = True
        thread.join(20)
        batcher.close(5)
        assert not thread.is_alive()


def wait_until(condition: Callable[[], object], seconds: float = 20) -> bool:
    """Whether a condition becomes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False
