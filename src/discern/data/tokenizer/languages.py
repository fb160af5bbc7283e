"""Default tokenizer of each language: kind, size, casing and word segmenter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

from discern.data.language_names import LANGUAGES, base_code, unknown_language
from discern.data.tokenizer.choice import TokenizerChoice
from discern.data.tokenizer.training import TokenizerKind
from discern.data.tokenizer.words import SegmenterName

# A lower-casing WordPiece also removes accents, as in BERT. That suits English and languages written with the same letters.
# Elsewhere it merges words, removes vowel signs from Hindi and Thai, and splits Hangul into its parts. Chinese has no case.
_LOWERCASED = {"en", "zh", "id", "ms", "tl", "sw"}
# Languages without spaces between words, in which a "word" of WordPiece would be a whole clause. Ideographs are split anyway.
_WITHOUT_SPACES = {"ja", "th", "lo", "km", "my", "bo", "dz"}
_DEFAULT_SIZE, _CHINESE_SIZE = 30_522, 21_128  # those of BERT


@dataclass(frozen=True)
class Language:
    """A language, and the tokenizer that suits it.

    Attributes:
        code: ISO 639-1 code, as in model cards.
        kind: kind of tokenizer to train.
        vocab_size: number of entries to train.
        lowercase: whether a trained tokenizer lower-cases.
        segmenter: word segmenter to use if it is installed.
    """

    code: str
    kind: TokenizerKind
    vocab_size: int
    lowercase: bool
    segmenter: SegmenterName

    @property
    def name(self) -> str:
        """English name of the language."""
        return LANGUAGES[self.code]

    def completed(self, choice: TokenizerChoice) -> TokenizerChoice:
        """The choice of tokenizer with the defaults of the language. A tokenizer is trained unless one is given."""
        if choice.path is not None:
            return choice
        trained = choice if choice.train is not None else replace(choice, train=self.kind)
        lowercase = self.lowercase if trained.lowercase is None else trained.lowercase
        return replace(trained, vocab_size=trained.vocab_size or self.vocab_size, lowercase=lowercase)

    def installed_segmenter(self) -> SegmenterName:
        """The segmenter, or 'none' where its package is not installed."""
        return self.segmenter if self.segmenter == "none" or find_spec(self.segmenter) is not None else "none"


def find_language(code: str) -> Language:
    """The language with this code. The region of a tag such as "zh-CN" is ignored.

    Raises:
        ConfigError: the code is unknown; the hint names the nearest language.
    """
    base = base_code(code)
    if base not in LANGUAGES:
        raise unknown_language(code)
    chinese = base == "zh"
    kind: TokenizerKind = "unigram" if base in _WITHOUT_SPACES else "wordpiece"
    return Language(base, kind, _CHINESE_SIZE if chinese else _DEFAULT_SIZE, base in _LOWERCASED, "jieba" if chinese else "none")
