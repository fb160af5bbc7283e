"""The tokenizer of somebody else's model, where a bare vocab.txt does not say what is done to a text first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from discern.data.tokenizer import bert_wordpiece, load_tokenizer, lowercases, prepared, special_ids
from discern.errors import DataError
from discern.interop.tokenizer import TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from discern.tasks.readers.files import json_file

VOCABULARY_NAME = "vocab.txt"

# (lower-cases, strips accents), in the order in which they are believed. Those who keep case keep accents.
_MANNERS = ((True, True), (True, False), (False, False))


@dataclass(frozen=True)
class FoundTokenizer:
    """A tokenizer, and where its manner of normalising comes from.

    Attributes:
        tokenizer: set up for use.
        manner: in words, such as 'lower-cased, by the entries of vocab.txt'.
        judged: whether it had to be judged by the entries.
    """

    tokenizer: Tokenizer
    manner: str
    judged: bool = False


def find_tokenizer(source: Path, given: Path | None, lowercase: bool | None) -> FoundTokenizer:
    """The tokenizer of a model.

    Args:
        source: folder of the model, or a file in it.
        given: a tokenizer.json, a vocab.txt, or a folder that holds either, which comes first.
        lowercase: what its owner says; None: as the files say, or else as the entries of the vocabulary tell. Of accents,
            likewise, where the casing is not as the files say and they are silent on accents.

    Raises:
        DataError: there is none, or it lacks a special token.
        ConfigError: `lowercase` contradicts a tokenizer.json.
    """
    folder = source if source.is_dir() else source.parent
    path = given if given is not None else folder
    if given is None and not any((folder / name).is_file() for name in (TOKENIZER_NAME, VOCABULARY_NAME)):
        raise DataError(
            f"{folder} has no tokenizer: neither {TOKENIZER_NAME} nor {VOCABULARY_NAME} is there",
            hint=f"the ids mean nothing without it: add --tokenizer PATH, the {VOCABULARY_NAME} that the model was trained with",
        )
    tokenizer = load_tokenizer(path, lowercase)
    file = path if path.is_file() else next(path / name for name in (TOKENIZER_NAME, VOCABULARY_NAME) if (path / name).is_file())
    if file.suffix == ".json":
        return FoundTokenizer(tokenizer, f"{_words(lowercases(tokenizer))}, as {file.name} says")
    settings = _settings(file.parent / TOKENIZER_CONFIG_NAME)
    stated, strips = settings.get("do_lower_case"), settings.get("strip_accents")
    if stated is None or lowercase not in (None, stated):
        vocabulary = tokenizer.get_vocab()
        lowers, strips = _judge(vocabulary, lowercase, strips)
        chinese = settings.get("tokenize_chinese_chars", True)
        tokenizer = prepared(bert_wordpiece(vocabulary, lowers, strips, chinese), str(file))
    else:
        lowers = stated  # and of accents, without a word on them, what BERT does
    judged = lowercase is None and stated is None
    whence = f"by the entries of {file.name}" if judged else f"as {TOKENIZER_CONFIG_NAME} says"
    return FoundTokenizer(tokenizer, f"{_words(lowers, strips)}, {'as asked for' if lowercase is not None else whence}", judged)


def _settings(path: Path) -> dict[str, Any]:
    """What stands in the file beside a vocabulary; nothing where there is none."""
    settings = json_file(path) if path.is_file() else {}
    return settings if isinstance(settings, dict) else {}


def _words(lowers: bool, strips: bool | None = None) -> str:
    """A manner of normalising, in words; the accents where they are treated otherwise than BERT treats them.

    Args:
        strips: None does as BERT does: only when lower-casing.
    """
    if strips in (None, lowers):
        return "lower-cased" if lowers else "cased"
    return "lower-cased with their accents kept" if lowers else "cased without accents"


def _judge(vocabulary: dict[str, int], lowercase: bool | None, strips: bool | None) -> tuple[bool, bool]:
    """The manner in which most entries can come out of a text: one that strips accents never gives 'é', for example.

    Args:
        lowercase, strips: None leaves it open.
    """
    telling = [entry for entry in vocabulary if entry.isalpha() and not (entry.isascii() and entry == entry.lower())]
    manners = [manner for manner in _MANNERS if lowercase in (None, manner[0])]
    if strips is not None:
        manners = list(dict.fromkeys((lowers, strips) for lowers, _ in manners))
    if not telling:
        return manners[0]
    return max(manners, key=lambda manner: _reached(vocabulary, telling, manner))  # of equal ones the first


def _reached(vocabulary: dict[str, int], entries: Sequence[str], manner: tuple[bool, bool]) -> int:
    """How many entries a text that consists of one gives back."""
    tokenizer = bert_wordpiece(vocabulary, *manner)
    encoded = tokenizer.encode_batch(list(entries), add_special_tokens=False)
    return sum(encoding.tokens == [entry] for entry, encoding in zip(entries, encoded, strict=True))


def check_fits(tokenizer: Tokenizer, rows: int, name: str) -> None:
    """Make sure that every id has a row in the word table.

    Raises:
        DataError: it has not, so the tokenizer is another model's.
    """
    special_ids(tokenizer, name)
    entries = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if entries > rows:
        raise DataError(
            f"{name}: the tokenizer has {entries:,} entries, the embeddings {rows:,} rows",
            hint="give the tokenizer that the model was trained with: --tokenizer PATH",
        )
