"""The tokenizer of a data set: an existing one, or one trained on the text itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, normalizers

from discern.data.curation.filters import Rules, all_left_out
from discern.data.executors import ProcessExecutor
from discern.data.sources.corpus import Corpus
from discern.data.tokenizer import prepared
from discern.data.tokenizer.training import SAMPLE_BYTES, SentenceSample, TokenizerKind, check_vocab_size, train_json
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
        keep_accents: whether a WordPiece that lower-cases keeps the accents, which BERT's removes.
    """

    path: Path | None = None
    train: TokenizerKind | None = None
    vocab_size: int | None = None
    lowercase: bool | None = None
    keep_accents: bool = False

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

    @property
    def lowercases(self) -> bool:
        """Whether a trained tokenizer lower-cases."""
        return self.train == "wordpiece" if self.lowercase is None else self.lowercase


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
    filtered = Counter[str]()
    for document in corpus.read(progress, "reading a sample for the tokenizer"):
        if not isinstance(document, list):
            raise ConfigError("the input is token ids, to which no tokenizer can be trained", hint="give their --tokenizer")
        kept, left_out = rules.apply([document])
        filtered += left_out
        for sentences in kept:
            sample.add(sentences)
    texts = sample.sentences()
    if filtered and not texts:
        raise all_left_out(filtered)
    progress.start(f"training the tokenizer on {len(texts):,} sentences", None, "")
    if choice.train == "wordpiece" and choice.lowercases and not choice.keep_accents:
        words = " ".join(texts[:_EXAMINED]).lower().split()
        accented = [word for word in words if _without_accents(word) != word]
        if len(accented) > _MANY_ACCENTS * len(words):
            progress.note(
                f"a wordpiece tokenizer that lower-cases also removes accents, as in BERT: '{accented[0]}' and "
                f"'{_without_accents(accented[0])}' become one word; to keep accents: --keep-accents, or --cased"
            )
    # In a separate process, because the library cannot be interrupted while it trains.
    with ProcessExecutor(1, threads) as executor:
        trained = executor.submit(train_json, choice.train, choice.size, choice.lowercases, texts, choice.keep_accents).result()
    progress.finish()
    tokenizer = prepared(Tokenizer.from_str(trained), f"the trained {choice.train} tokenizer")
    return TrainedTokenizer(tokenizer, len(texts), sum(map(len, texts)))
