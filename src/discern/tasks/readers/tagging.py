"""Tagged sentences: CoNLL columns, and Chinese with a character a line.

A word a line, columns parted by tabs or spaces, a blank line between sentences; the last sentence needs none behind it.
`-DOCSTART-` lines part documents and are no words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from discern.data.problems import ProblemLog
from discern.errors import ConfigError, DataError
from discern.tasks.examples import Reading, TaggingExample, tag_counts
from discern.tasks.readers.files import COMPRESSED, numbered_lines
from discern.tasks.tags import broken_starts, detect_scheme

# File names of a split by the habits of the formats read here.
TAGGING_FILES: dict[str, tuple[str, ...]] = {
    "train": (
        "train.txt",
        "train.conll",
        "train.tsv",
        "train.bio",
        "eng.train",
        "weiboNER_2nd_conll.train",
        "weiboNER.conll.train",
    ),
    "dev": (
        "dev.txt",
        "valid.txt",
        "dev.conll",
        "dev.tsv",
        "dev.bio",
        "eng.testa",
        "weiboNER_2nd_conll.dev",
        "weiboNER.conll.dev",
    ),
    "test": ("test.txt", "test.conll", "test.tsv", "test.bio", "eng.testb", "weiboNER_2nd_conll.test", "weiboNER.conll.test"),
}
COLUMN_ENDINGS = (".conll", ".conllu", ".bio", ".iob")
"""Ends of the names of files that have a word a line, whatever they are read for."""
# Words of several tokens (1-2) and words that are not written (8.1): lines of CoNLL-U that stand beside the words themselves.
_BESIDE = re.compile(r"\d+[-.]\d+")
# A character, or what stands for one that an encoder lost, and its place in its word: Weibo NER's raw files.
_NUMBERED = re.compile(r"(.[^\d]*)\d+", re.DOTALL)
_SPACES = re.compile(r"[ \t]+")


def ending_of(path: Path) -> str:
    """The end of a file's name, without that of a compression."""
    return next((end.lower() for end in reversed(path.suffixes) if end.lower() not in COMPRESSED), "")


def read_conll(
    path: Path, *, word_column: int = 0, tag_column: int | None = -1, characters: bool = False
) -> Reading[TaggingExample]:
    """The sentences of a file of columns.

    Where any line has a tab, tabs part the columns (a word may then hold a space), otherwise spaces do. Ids number the sentences.
    In CoNLL-U (.conllu) ranges of words, and words that are not written, are left out.

    Args:
        word_column: the column of the words, from 0; negative counts from the right.
        tag_column: the column of the tags; None reads words only.
        characters: a character a line; a number behind each character (its place in its word, as in Weibo NER) is taken off.

    Raises:
        ConfigError: there is no such column.
        DataError: no sentence, or lines of unequal numbers of columns.
    """
    problems = ProblemLog()
    by_tabs = any("\t" in line for _, line in numbered_lines(path))
    universal = ending_of(path) == ".conllu"
    words: list[str] = []
    tags: list[str] = []
    places: list[str] = []
    sentences: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    for number, fields in _rows(path, by_tabs, problems):
        if universal and fields and _BESIDE.fullmatch(fields[0]):
            problems.add("line of CoNLL-U that is no word of the sentence, left out", f"{path}:{number}")
            continue
        if fields:
            places += [f"{path}:{number}"] * (not words)
            words.append(_column(fields, word_column, path, "word"))
            tags.append(_column(fields, tag_column, path, "tag") if tag_column is not None else "")
        elif words:
            sentences.append((tuple(words), tuple(tags)))
            words, tags = [], []
    if not sentences:
        raise DataError(
            f"{path} holds no sentence", hint="expected a word a line, its tag in the last column, blank lines between sentences"
        )
    notes = []
    if characters:
        sentences, numbered = _without_numbers(sentences)
        notes += ["numbers behind the characters (their places in words) taken off"] * numbered
    examples = tuple(
        TaggingExample(str(number), row, tags if tag_column is not None else None) for number, (row, tags) in enumerate(sentences)
    )
    if tag_column is not None:
        notes += _scheme_notes(examples)
    return Reading(examples, str(path), problems.summary(), tuple(notes), tuple(places))


def _rows(path: Path, by_tabs: bool, problems: ProblemLog) -> Iterator[tuple[int, list[str]]]:
    """Number and columns of each line; an empty list where a sentence ends."""
    count: int | None = None
    first = number = 0
    for number, line in numbered_lines(path):
        if not line.strip(" \t"):
            yield number, []
            continue
        fields = line.split("\t") if by_tabs else _SPACES.split(line.strip(" "))
        if fields[0].strip() == "-DOCSTART-":
            yield number, []
            continue
        if line.startswith("# ") and len(fields) != (count or 2):
            problems.add("comment line, left out", f"{path}:{number}")
            continue
        if count is None:
            count, first = len(fields), number
        if len(fields) != count:
            raise DataError(
                f"{path}:{number} has {len(fields)} columns, line {first} has {count}: {line[:60]!r}",
                hint="every word needs as many columns; a blank line parts sentences",
            )
        if not fields[-1].strip() or not fields[0].strip():
            raise DataError(
                f"{path}:{number}: an empty column: {line[:60]!r}", hint="every word needs a tag, 'O' where it is in no span"
            )
        yield number, fields
    yield number + 1, []


def _column(fields: list[str], place: int, path: Path, what: str) -> str:
    if not -len(fields) <= place < len(fields):
        raise ConfigError(
            f"{path} has {len(fields)} columns and no {what} column {place}",
            hint=f"choose 0 to {len(fields) - 1}, or -1 for the last",
        )
    return fields[place].strip(" \t")


def _without_numbers(
    sentences: list[tuple[tuple[str, ...], tuple[str, ...]]],
) -> tuple[list[tuple[tuple[str, ...], tuple[str, ...]]], bool]:
    """The sentences without the numbers, if every word of the file has one; and whether that was so."""
    if not all(_NUMBERED.fullmatch(word) for words, _ in sentences for word in words):
        return sentences, False
    return [(tuple(_character(word) for word in words), tags) for words, tags in sentences], True


def _character(word: str) -> str:
    found = _NUMBERED.fullmatch(word)
    assert found is not None
    return found.group(1)


def _scheme_notes(examples: tuple[TaggingExample, ...]) -> list[str]:
    sequences = [example.tags or () for example in examples]
    scheme = detect_scheme(sequences)
    kinds = len(tag_counts(examples))
    if scheme == "none":
        return [f"{kinds} tags that mark no spans"]
    notes = [f"{kinds} tags in scheme {scheme.upper()}"]
    broken = broken_starts(sequences) if scheme != "iob1" else 0
    if broken:
        notes.append(
            f"{broken:,} spans begin with I, which {scheme.upper()} does not have; they are read as conlleval reads them"
        )
    return notes
