"""The tokenizer of a data set: an existing one, or one trained on the text itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer, normalizers

from discern.data.curation.filters import Rules, all_left_out
from discern.data.executors import ProcessExecutor
from discern.data.sources.corpus import Corpus
from discern.data.tokenizer import prepared, strips_accents
from discern.data.tokenizer.training import SAMPLE_BYTES, SMALLEST_SIZES, TokenizerKind, sample, train_tokenizer
from discern.errors import ConfigError
from discern.progress import Progress

_DEFAULT_SIZE, _CHINESE_SIZE = 30_522, 21_128  # those of BERT
# A lower-casing WordPiece also removes accents, as in BERT. That suits English and languages written with the same letters.
# Elsewhere it merges words, removes vowel signs from Hindi and Thai, and splits Hangul into its parts. Chinese has no case.
_LOWERCASED = {"en", "zh", "id", "ms", "tl", "sw"}
# Languages without spaces between words, in which a "word" of WordPiece would be a whole clause. Ideographs are split anyway.
_WITHOUT_SPACES = {"ja", "th", "lo", "km", "my", "bo", "dz"}
_EXAMINED = 2000  # sentences
_MANY_ACCENTS = 0.01  # fraction of accented words; in English fewer, in languages in which accents distinguish words more
_without_accents = normalizers.BertNormalizer(handle_chinese_chars=False).normalize_str


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
        if (self.path is None) is (self.train is None) or (self.path and self.vocab_size):
            raise ConfigError(
                "expected either --tokenizer, or --train-tokenizer with --vocab-size",
                hint="--tokenizer PATH uses a tokenizer; --train-tokenizer wordpiece --vocab-size 8000 trains one",
            )
        if self.train is not None and self.size < (least := SMALLEST_SIZES[self.train]):
            raise ConfigError(
                f"a {self.train} vocabulary needs at least {least} entries, not {self.size}",
                hint="8000 is usual for a small corpus: --vocab-size 8000",
            )

    def in_language(self, code: str) -> TokenizerChoice:
        """The choice with the defaults of a language. A tokenizer is trained unless one is given."""
        if self.path is not None:
            return self
        kind: TokenizerKind = "unigram" if code in _WITHOUT_SPACES else "wordpiece"
        lowercase = code in _LOWERCASED if self.lowercase is None else self.lowercase
        size = _CHINESE_SIZE if code == "zh" and self.vocab_size is None else self.vocab_size
        return replace(self, train=self.train or kind, vocab_size=size, lowercase=lowercase)

    @property
    def size(self) -> int:
        """Number of entries to train."""
        return _DEFAULT_SIZE if self.vocab_size is None else self.vocab_size

    @property
    def lowercases(self) -> bool:
        """Whether a trained tokenizer lower-cases."""
        return self.train == "wordpiece" if self.lowercase is None else self.lowercase


def train_on(
    corpus: Corpus, choice: TokenizerChoice, seed: int, threads: int, progress: Progress, filters: Sequence[str]
) -> Tokenizer:
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
    rules, filtered = Rules(filters), Counter[str]()

    def sentences() -> Iterator[str]:
        for document in corpus.read(progress, "reading a sample for the tokenizer"):
            if not isinstance(document, list):
                raise ConfigError(
                    "the input is token ids, on which no tokenizer can be trained", hint="give its --tokenizer PATH"
                )
            (kept,), left_out = rules.apply([document])
            filtered.update(left_out)
            yield from kept or ()

    texts = sample(sentences(), seed, SAMPLE_BYTES[choice.train])
    if filtered and not texts:
        raise all_left_out(filtered)
    progress.start(f"training the tokenizer on {len(texts):,} sentences", None, "")
    # In a separate process, because the library cannot be interrupted while it trains.
    with ProcessExecutor(1, threads) as executor:
        task = executor.submit(train_tokenizer, choice.train, choice.size, choice.lowercases, texts, choice.keep_accents)
        tokenizer = prepared(task.result(), "the trained tokenizer")
    progress.finish()
    if strips_accents(tokenizer):
        words = " ".join(texts[:_EXAMINED]).lower().split()
        accented = [word for word in words if _without_accents(word) != word]
        if len(accented) > _MANY_ACCENTS * len(words):
            progress.note(
                f"a wordpiece tokenizer that lower-cases also removes accents, as in BERT: '{accented[0]}' and "
                f"'{_without_accents(accented[0])}' become one word; to keep accents: --keep-accents, or --cased"
            )
    return tokenizer
