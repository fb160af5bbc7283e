"""The data set that the tests of runs train on."""

from pathlib import Path

import pytest

from discern.data.job import PrepareOptions
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.progress import Silent
from tests.data.small_text import made_up, plain


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set with a vocabulary of its own."""
    folder = tmp_path_factory.mktemp("pretrain")
    (folder / "text.txt").write_text(plain(made_up(300)))
    choice, build = TokenizerChoice(train="wordpiece", vocab_size=300), PrepareOptions(heldout=0.1, workers=1)
    prepare([str(folder / "text.txt")], out=folder / "data", tokenizer=choice, options=build, progress=Silent())
    return folder / "data"
