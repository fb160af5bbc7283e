"""The tokenizer that a data set is made with: one that exists, or one trained on the text itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from discern.data.corpus import Corpus
from discern.data.manifest import TokenizerInfo
from discern.data.meter import Meter
from discern.data.problems import ProblemLog
from discern.data.processes import WorkerProcess
from discern.data.tokenizer import fingerprint, lowercases, prepared, special_ids, vocab_size
from discern.data.tokenizer_training import SAMPLE_BYTES, SentenceSample, TokenizerKind, check_vocab_size, training_service
from discern.errors import ConfigError
from discern.progress import Progress

DEFAULT_VOCAB_SIZE = 30522


@dataclass(frozen=True)
class TokenizerChoice:
    """What the user asked for: exactly one of `path` and `train`.

    Attributes:
        path: an existing tokenizer.
        train: kind of tokenizer to train.
        vocab_size: entries of the trained one.
        lowercase: None leaves it to the tokenizer; a trained WordPiece lower-cases, the others keep case.
    """

    path: Path | None = None
    train: TokenizerKind | None = None
    vocab_size: int | None = None
    lowercase: bool | None = None

    def check(self) -> None:
        """Refuse contradictions before any work.

        Raises:
            ConfigError: both or neither of a path and a kind; a size that does not fit.
        """
        if self.path is not None and self.train is not None:
            raise ConfigError("both --tokenizer and --train-tokenizer are given", hint="leave one of them out")
        if self.path is None and self.train is None:
            raise ConfigError(
                "no tokenizer is given",
                hint="add --tokenizer PATH to use one, or --train-tokenizer wordpiece --vocab-size 8000 to train one",
            )
        if self.path is not None and self.vocab_size is not None:
            raise ConfigError(
                "--vocab-size goes with --train-tokenizer; a given tokenizer has the size it has", hint="leave it out"
            )
        if self.train is not None:
            check_vocab_size(self.train, self.size)

    @property
    def size(self) -> int:
        """Entries to train."""
        return self.vocab_size or DEFAULT_VOCAB_SIZE


@dataclass(frozen=True)
class TrainedTokenizer:
    """A tokenizer and the size of the sample that it was trained on."""

    tokenizer: Tokenizer
    sentences: int
    characters: int


def train_on(corpus: Corpus, choice: TokenizerChoice, seed: int, threads: int, progress: Progress) -> TrainedTokenizer:
    """Read the whole input for a sample of it, and train on that.

    Raises:
        ConfigError: the input cannot be read twice.
        DataError: there is no text.
    """
    assert choice.train is not None
    if not corpus.rereadable:
        raise ConfigError(
            "to train a tokenizer the input is read twice, which standard input or a pipe cannot be",
            hint="save the text to a file first, or give a --tokenizer",
        )
    sample = SentenceSample(seed, SAMPLE_BYTES[choice.train])
    meter = Meter(progress, "reading a sample for the tokenizer", corpus)
    for document in meter.read(ProblemLog()):
        sample.add(document)
        meter.show()
    meter.finish()
    texts = sample.sentences()
    progress.start(f"training the tokenizer on {len(texts):,} sentences", None, "")
    lowercase = choice.train == "wordpiece" if choice.lowercase is None else choice.lowercase
    # In a process of its own: the library cannot be interrupted while it trains.
    with WorkerProcess[Any, Any](training_service, (choice.train, choice.size, lowercase), threads) as process:
        tokenizer = prepared(Tokenizer.from_str(process.ask(texts)), f"the trained {choice.train} tokenizer")
    progress.finish()
    return TrainedTokenizer(tokenizer, len(texts), sum(map(len, texts)))


def describe(tokenizer: Tokenizer, trained: TrainedTokenizer | None) -> TokenizerInfo:
    """What the manifest says of the tokenizer."""
    return TokenizerInfo(
        fingerprint=fingerprint(tokenizer),
        kind=type(tokenizer.model).__name__.lower(),
        vocab_size=vocab_size(tokenizer),
        special_tokens=special_ids(tokenizer),
        lowercase=lowercases(tokenizer),
        trained_on_sentences=trained.sentences if trained else None,
        trained_on_characters=trained.characters if trained else None,
    )
