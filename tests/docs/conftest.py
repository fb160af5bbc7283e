"""What the tests of commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.world import write_models, write_texts


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that pages and examples name, made with the commands themselves. Tests copy it."""
    folder = tmp_path_factory.mktemp("world")
    write_texts(folder)
    write_models(folder)
    return folder
