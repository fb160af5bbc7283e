"""Tagged sentences in CoNLL columns: chunking, named entities, and Weibo NER with one Chinese character per line.

The files have one word per line, columns separated by tabs or spaces, and a blank line between sentences. `-DOCSTART-` lines
separate documents and are not words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from discern.data.sources.problems import ProblemLog
from discern.errors import ConfigError, DataError
from discern.tasks.base import Definition, Source, TaskConfig
from discern.tasks.examples import Reading, TaggingExample, tag_counts
from discern.tasks.readers.files import existing_splits, numbered_lines, suffix_of
from discern.tasks.tagging import Tagging, TaggingConfig
from discern.tasks.tags import broken_starts, detect_scheme

# Usual file names of each split.
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
# Suffixes of files with one word per line.
COLUMN_SUFFIXES = (".conll", ".conllu", ".bio", ".iob")
# Multiword tokens (1-2) and empty nodes (8.1) of CoNLL-U, which are not words of the sentence.
_NOT_A_WORD = re.compile(r"\d+[-.]\d+")
# A character, or a placeholder for one, and its position in its word, as in Weibo NER's raw files.
_NUMBERED = re.compile(r"(.[^\d]*)\d+", re.DOTALL)
_SPACES = re.compile(r"[ \t]+")


def read_conll(
    path: Path, *, word_column: int = 0, tag_column: int | None = -1, characters: bool = False
) -> Reading[TaggingExample]:
    """The sentences of a file of columns.

    If any line has a tab, columns are separated by tabs, and words may contain spaces; otherwise they are separated by spaces.
    Ids are sentence numbers. Comments are left out: in CoNLL-U (.conllu), all lines that begin with "#"; elsewhere, lines that
    begin with "# " and have another number of columns than the others, or begin a sentence and do not end like another line.
    So are the multiword tokens and empty nodes of CoNLL-U.

    Args:
        word_column: column of the words, from 0; negative numbers count from the right.
        tag_column: column of the tags; None: read words only.
        characters: one character per line; a number after each character (its position in its word, as in Weibo NER) is
            removed.

    Raises:
        ConfigError: a column does not exist.
        DataError: there are no sentences, or lines have different numbers of columns.
    """
    problems = ProblemLog()
    universal = suffix_of(path) == ".conllu"
    layout = _Layout.of(path)
    words: list[str] = []
    tags: list[str] = []
    places: list[str] = []
    sentences: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    for number, fields in _rows(path, layout, problems, universal=universal):
        if universal and fields and _NOT_A_WORD.fullmatch(fields[0]):
            problems.add("line of CoNLL-U that is not a word, left out", f"{path}:{number}")
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
            f"{path} has no sentences",
            hint="expected one word per line, its tag in the last column, and blank lines between sentences",
        )
    notes = []
    if characters:
        sentences, numbered = _without_numbers(sentences)
        notes += ["the numbers after the characters (their positions in words) are removed"] * numbered
    examples = tuple(
        TaggingExample(str(number), row, tags if tag_column is not None else None) for number, (row, tags) in enumerate(sentences)
    )
    if tag_column is not None:
        notes += _scheme_notes(examples)
    return Reading(examples, str(path), problems.summary(), tuple(notes), tuple(places))


@dataclass(frozen=True)
class _Layout:
    """What the lines of a file that cannot be comments have in common.

    Attributes:
        by_tabs: whether columns are separated by tabs.
        columns: number of columns of the first line; None: every line may be a comment.
        last: the values of the last column.
    """

    by_tabs: bool
    columns: int | None
    last: frozenset[str]

    @classmethod
    def of(cls, path: Path) -> _Layout:
        lines = [line for _, line in numbered_lines(path) if line.strip(" \t") and not line.startswith("# ")]
        by_tabs = any("\t" in line for line in lines)
        plain = cls(by_tabs, None, frozenset())
        rows = (plain.fields(line) for line in lines if not line.startswith("-DOCSTART-"))
        first = next(rows, None)
        if first is None:
            return plain
        return cls(by_tabs, len(first), frozenset({first[-1], *(fields[-1] for fields in rows)}))

    def fields(self, line: str) -> list[str]:
        """The columns of a line."""
        return line.split("\t") if self.by_tabs else _SPACES.split(line.strip(" "))

    def is_comment(self, line: str, *, begins: bool) -> bool:
        """Whether a line is a comment. A word "#" has as many columns as the other words.

        Args:
            begins: whether no word of its sentence has come yet.
        """
        if not line.startswith("# "):
            return False
        fields = self.fields(line)
        return len(fields) != (self.columns or 2) or (begins and bool(self.last) and fields[-1] not in self.last)


def _rows(path: Path, layout: _Layout, problems: ProblemLog, *, universal: bool) -> Iterator[tuple[int, list[str]]]:
    """Line number and columns of each line, with an empty list at the end of each sentence.

    Args:
        universal: the file is CoNLL-U.
    """
    count: int | None = None
    first = number = 0
    begins = True
    for number, line in numbered_lines(path):
        fields = layout.fields(line)
        if not line.strip(" \t") or fields[0].strip() == "-DOCSTART-":
            begins = True
            yield number, []
            continue
        if layout.is_comment(line, begins=begins) or (universal and line.startswith("#")):
            problems.add("comment line, left out", f"{path}:{number}")
            continue
        begins = False
        if count is None:
            count, first = len(fields), number
        if len(fields) != count:
            raise DataError(
                f"{path}:{number} has {len(fields)} columns, but line {first} has {count}: {line[:60]!r}",
                hint="every word needs the same number of columns; a blank line separates sentences",
            )
        if not fields[-1].strip(" \t") or not fields[0].strip(" \t"):  # other white space may be a word
            raise DataError(
                f"{path}:{number}: an empty column: {line[:60]!r}", hint="every word needs a tag, 'O' if it is in no span"
            )
        yield number, fields
    yield number + 1, []


def _column(fields: list[str], place: int, path: Path, what: str) -> str:
    if not -len(fields) <= place < len(fields):
        raise ConfigError(
            f"{path} has {len(fields)} columns, but no {what} column {place}",
            hint=f"choose 0 to {len(fields) - 1}, or -1 for the last",
        )
    return fields[place].strip(" \t")


def _without_numbers(
    sentences: list[tuple[tuple[str, ...], tuple[str, ...]]],
) -> tuple[list[tuple[tuple[str, ...], tuple[str, ...]]], bool]:
    """The sentences without the numbers if every word of the file has one, and whether that is so."""
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
        notes.append(f"spans that begin with I, which {scheme.upper()} does not allow: {broken:,}, read as by conlleval")
    return notes


_METRICS = ("f1", "precision", "recall", "accuracy")
# The released code uses 256 tokens for chunking.
_DEFAULTS: dict[str, object] = {"task.sequence_length": 256}


@dataclass(frozen=True)
class ConllSource(Source[TaggingExample]):
    """Files of columns with the usual names of such corpora.

    Attributes:
        word_column, tag_column: columns from 0; negative numbers count from the right.
        characters: one character per line, perhaps followed by its position in its word.
    """

    word_column: int = 0
    tag_column: int = -1
    characters: bool = False

    def configured(self, config: TaskConfig) -> ConllSource:
        chosen = cast(TaggingConfig, config)
        return replace(self, word_column=chosen.word_column, tag_column=chosen.tag_column)

    def splits(self, folder: Path) -> dict[str, Path]:
        return existing_splits(folder, TAGGING_FILES)

    def read(self, path: Path, split: str, *, labeled: bool = True) -> Reading[TaggingExample]:
        """The sentences of a file; a file with a column of words only has no tags.

        Raises:
            ConfigError: a column does not exist, or words and tags of a training file are the same column.
            DataError: there are no sentences, or lines have different numbers of columns.
        """
        tag_column = self.tag_column if labeled else None
        reading = read_conll(path, word_column=self.word_column, tag_column=tag_column, characters=self.characters)
        if not labeled or any(example.words != example.tags for example in reading.examples):
            return reading
        # The last column is also the first: a file of words only.
        if split == "train":
            raise ConfigError(
                f"{path}: the column of the tags ({self.tag_column}) is also that of the words ({self.word_column})",
                hint="a training file needs both: --words N --tags M, for a named task --set task.word_column=N "
                "--set task.tag_column=M",
            )
        return self.read(path, split, labeled=False)


def _definition(name: str, source: ConllSource) -> Definition[TaggingExample]:
    # Papers report the test file; the dev file selects the weights.
    return Definition(name, Tagging, source, _METRICS, defaults=_DEFAULTS, report_splits=("test",))


CHUNK = _definition("chunk", ConllSource())
NER = _definition("ner", ConllSource())
WEIBO_NER = _definition("weibo-ner", ConllSource(characters=True))
