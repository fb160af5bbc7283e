"""What the tests of fine-tuning begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from discern.workflows.finetune import FinetuneRequest
from tests.workflows.small_run import make_run
from tests.workflows.small_task import small_request


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that a file's tests share."""
    folder = tmp_path_factory.mktemp("models") / "run"
    make_run(folder)
    return folder


@pytest.fixture
def request_(tmp_path: Path, small_model: Path) -> FinetuneRequest:
    """A fine-tuning of it that takes a second."""
    return small_request(small_model, tmp_path)
