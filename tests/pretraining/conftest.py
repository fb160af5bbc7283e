"""The data set that the tests of runs train on."""

import random
from pathlib import Path

import pytest

from tests.pretraining.commands import WORDS, run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set with a vocabulary of its own."""
    folder = tmp_path_factory.mktemp("pretrain")
    rng = random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=rng.randint(4, 14))) + "." for _ in range(3000)]
    text = "\n".join(line + ("\n" if number % 9 == 8 else "") for number, line in enumerate(lines))
    (folder / "text.txt").write_text(text)
    options = ["--train-tokenizer", "wordpiece", "--vocab-size", "300", "--lowercase", "--heldout", "0.05"]
    done = run("prepare", folder / "text.txt", "--out", folder / "data", *options)
    assert done.returncode == 0, done.stderr
    return folder / "data"
