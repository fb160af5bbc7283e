"""Small worlds for tests: splits in memory, batches by hand."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from discern.data.dataset.shards import Shard, TokenSplit
from discern.models.config import build_config
from discern.objectives.base import BuildSettings, Vocabulary
from discern.types import SpecialTokens, TokenBatch

SPECIAL = SpecialTokens(pad=0, unk=1, cls=2, sep=3, mask=4)

MODELS: dict[str, dict[str, Any]] = {"permutation-lm": {"encoder": "xlnet", "embedding_size": 16}}
"""What an objective needs of its model, by name, where the sizes of `settings` will not do."""


class MemoryShard(Shard):
    """A shard that is arrays."""

    tokens: Any = None  # in place of the properties
    document_starts: Any = None
    sentence_starts: Any = None

    def __init__(self, tokens: np.ndarray, document_starts: np.ndarray, sentence_starts: np.ndarray, first_token: int) -> None:
        vars(self).update(tokens=tokens, document_starts=document_starts, sentence_starts=sentence_starts)
        self.first_token = first_token


class MemorySplit(TokenSplit):
    """A split of documents given as lists of sentences, each a list of ids; `per_shard` documents a shard.

    Words begin at the ids that `begins` says, or at every token.
    """

    def __init__(
        self, documents: list[list[list[int]]], per_shard: int = 10**9, begins: Callable[[int], bool] = lambda token: True
    ) -> None:
        self.shards = []
        first = 0
        for begin in range(0, len(documents), per_shard):
            part = documents[begin : begin + per_shard]
            sentences = [len(sentence) for document in part for sentence in document]
            lengths = [sum(map(len, document)) for document in part]
            tokens = np.array([token for document in part for sentence in document for token in sentence], np.int64)
            starts = [np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64) for sizes in (lengths, sentences)]
            self.shards.append(MemoryShard(tokens, starts[0], starts[1], first))
            first += len(tokens)
        self.num_tokens = first
        self._tokens = np.concatenate([shard.tokens for shard in self.shards])
        self._word_starts = np.array([begins(token) for token in self._tokens.tolist()], bool)

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.num_tokens
        return self._tokens[start:stop]

    def word_starts(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= self.num_tokens
        return self._word_starts[start:stop]


def random_documents(
    count: int, vocab_size: int, seed: int = 0, sentences: tuple[int, int] = (1, 8), words: tuple[int, int] = (1, 40)
) -> list[list[list[int]]]:
    """Documents of random ids above the special ones."""
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(5, vocab_size, rng.integers(*words)).tolist() for _ in range(rng.integers(*sentences))]
        for _ in range(count)
    ]


def make_batch(ids: list[list[int]], special: SpecialTokens = SPECIAL) -> TokenBatch:
    """A batch of rows given as ids, special tokens included; shorter rows are padded."""
    length = max(map(len, ids))
    input_ids = torch.tensor([row + [special.pad] * (length - len(row)) for row in ids])
    attention = torch.tensor([[True] * len(row) + [False] * (length - len(row)) for row in ids])
    is_special = ~attention | torch.isin(input_ids, torch.tensor([special.cls, special.sep]))
    count = len(ids)
    return TokenBatch(
        input_ids=input_ids,
        attention_mask=attention,
        special_tokens_mask=is_special,
        token_type_ids=torch.zeros_like(input_ids),
        position_ids=torch.arange(length).expand(count, length).contiguous(),
        document_ids=None,
        word_starts=None,
        example_index=torch.arange(count),
        slot=torch.arange(count),
        full=bool(attention.all()),
    )


def settings(vocab_size: int = 50, **model: Any) -> BuildSettings:
    """Build settings of a tiny network."""
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "embedding_size": 8,
        "num_heads": 2,
        "feedforward_size": 32,
        "max_positions": 64,
    }
    return BuildSettings(build_config(**(sizes | model)), Vocabulary(vocab_size, SPECIAL))


def run_python(*arguments: object, cwd: str | Path = ".") -> CompletedProcess[str]:
    """Run `python PROGRAM ...`, `python -m MODULE ...` or `python -c CODE` in this process: to start one takes seconds."""
    argv, streams, code = [str(argument) for argument in arguments], (StringIO(), StringIO()), 0
    options = argv[argv[0] in ("-m", "-c") :]
    with chdir(cwd), redirect_stdout(streams[0]), redirect_stderr(streams[1]), patch.object(sys, "argv", options):
        try:
            if argv[0] == "-c":
                exec(argv[1], {"__name__": "__main__"})
            elif argv[0] == "-m":
                runpy.run_module(argv[1], run_name="__main__")
            else:
                runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
            if isinstance(ending.code, str):
                streams[1].write(ending.code)
    return CompletedProcess(argv, code, streams[0].getvalue(), streams[1].getvalue())


def run_discern(*arguments: object, cwd: str | Path = ".") -> CompletedProcess[str]:
    """Run `discern ARGUMENTS` in this process."""
    return run_python("-m", "discern", *arguments, cwd=cwd)
