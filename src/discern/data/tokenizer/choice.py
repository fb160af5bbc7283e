"""The tokenizer of a data set: an existing one, or one trained on the text itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from discern.data.curation.filters import Rules, all_left_out
from discern.data.executors import WorkerProcess
from discern.data.sources.corpus import Corpus, CorpusProgress
from discern.data.sources.documents import ProblemLog
from discern.data.tokenizer import prepared
from discern.data.tokenizer.training import SAMPLE_BYTES, SentenceSample, TokenizerKind, check_vocab_size, training_service
from discern.errors import ConfigError
from discern.progress import Progress

DEFAULT_VOCAB_SIZE = 30522
_EXAMINED = 2000  # sentences
_MANY_ACCENTS = 0.01  # fraction of accented words; in English fewer, in languages in which accents distinguish words more
_without_accents = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.NFC()]).normalize_str


@dataclass(frozen=True)
class TokenizerChoice:
    """The tokenizer to use or to train: exactly one of `path` and `train`.

    Attributes:
        path: an existing tokenizer.
        train: kind of tokenizer to train.
        vocab_size: number of entries to train; if None, 30522.
        lowercase: whether to lower-case. If None, an existing tokenizer decides; of new ones, only WordPiece lower-cases.
    """

    path: Path | None = None
    train: TokenizerKind | None = None
    vocab_size: int | None = None
    lowercase: bool | None = None

    def check(self) -> None:
        """Check the choice before any work.

        Raises:
            ConfigError: both or neither of path and kind are given, or the vocabulary is too small.
        """
        if self.path is not None and self.train is not None:
            raise ConfigError("both --tokenizer and --train-tokenizer are given", hint="leave out one of them")
        if self.path is None and self.train is None:
            raise ConfigError(
                "no tokenizer is given",
                hint="add --tokenizer PATH to use one, or --train-tokenizer wordpiece --vocab-size 8000 to train one",
            )
        if self.path is not None and self.vocab_size is not None:
            raise ConfigError(
                "--vocab-size requires --train-tokenizer; the size of an existing tokenizer is fixed", hint="omit it"
            )
        if self.train is not None:
            check_vocab_size(self.train, self.size)

    @property
    def size(self) -> int:
        """Number of entries to train."""
        return DEFAULT_VOCAB_SIZE if self.vocab_size is None else self.vocab_size


@dataclass(frozen=True)
class TrainedTokenizer:
    """A trained tokenizer and the size of its training sample."""

    tokenizer: Tokenizer
    sentences: int
    characters: int


def train_on(
    corpus: Corpus, choice: TokenizerChoice, seed: int, threads: int, progress: Progress, filters: Sequence[str] = ()
) -> TrainedTokenizer:
    """Train a tokenizer on a sample of the whole input, without what filters leave out.

    Raises:
        ConfigError: the input cannot be read twice.
        DataError: the input contains no text.
    """
    assert choice.train is not None
    if not corpus.rereadable:
        raise ConfigError(
            "the input is read twice to train a tokenizer, which is not possible with standard input or a pipe",
            hint="save the text to a file first, or give a --tokenizer",
        )
    sample = SentenceSample(seed, SAMPLE_BYTES[choice.train])
    rules = Rules(filters)
    meter = CorpusProgress(progress, "reading a sample for the tokenizer", corpus)
    filtered = Counter[str]()
    for document in meter.read(ProblemLog()):
        kept, left_out = rules.apply([document])
        filtered += left_out
        for sentences in kept:
            sample.add(sentences)
        meter.show()
    meter.finish()
    texts = sample.sentences()
    if filtered and not texts:
        raise all_left_out(filtered)
    progress.start(f"training the tokenizer on {len(texts):,} sentences", None, "")
    lowercase = choice.train == "wordpiece" if choice.lowercase is None else choice.lowercase
    words = " ".join(texts[:_EXAMINED]).lower().split()
    accented = [word for word in words if _without_accents(word) != word]
    if choice.train == "wordpiece" and lowercase and len(accented) > _MANY_ACCENTS * len(words):
        progress.note(
            f"a wordpiece tokenizer that lower-cases also removes accents, as in BERT: '{accented[0]}' and "
            f"'{_without_accents(accented[0])}' become one word; to keep accents: --cased, or --train-tokenizer bpe --lowercase"
        )
    # In a separate process, because the library cannot be interrupted while it trains.
    with WorkerProcess[Any, Any](training_service, (choice.train, choice.size, lowercase), threads) as process:
        tokenizer = prepared(Tokenizer.from_str(process.ask(texts)), f"the trained {choice.train} tokenizer")
    progress.finish()
    return TrainedTokenizer(tokenizer, len(texts), sum(map(len, texts)))
