"""Overlap of training text with evaluation sets: examples that share thirteen words in a row with the text.

Reference: Brown et al. 2020 (GPT-3), appendix C: 13-grams of lower-cased words without punctuation, and at least 8 words.
Differs: there, n is one number for each data set, the 5th percentile of the lengths of its examples; here an example of 8 to
12 words is looked for as a whole.
"""

from __future__ import annotations

import unicodedata
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt

from discern.config.schema import Section
from discern.data.hashing import splitmix64
from discern.data.sources.documents import Document
from discern.data.tables import is_header, one_object, open_table, suffix_of

NGRAM_WORDS = 13  # this many words in a row count as overlap
SHORTEST_WORDS = 8  # a text of fewer words is not checked: too many are common phrases

_SIZES = range(SHORTEST_WORDS, NGRAM_WORDS + 1)
_OTHER_WORD = 1 << 32  # id of a word that is in no evaluation file


class FoundExample(Section):
    """An example of an evaluation file that overlaps with the text.

    Attributes:
        line: line of the evaluation file where the example begins.
        words: the words in a row that both have, lower-cased and without punctuation.
        input: name of the input that the text was read from.
        document: number of the document in that input, from 1.
        begins: beginning of the document.
    """

    line: int
    words: str
    input: str
    document: int
    begins: str


class FileOverlap(Section):
    """Overlap of an evaluation file with the text.

    Attributes:
        file: the evaluation file, as it was named.
        examples: number of examples in the file.
        checked: examples with a text of at least 8 words.
        too_short: examples without one, which are not checked.
        overlapping: checked examples that overlap with the text.
        share: `overlapping` / `checked`; None if none is checked.
        found: the first overlapping examples, in the order of the text.
    """

    file: str
    examples: int
    checked: int
    too_short: int
    overlapping: int
    share: float | None
    found: tuple[FoundExample, ...]

    def __str__(self) -> str:
        share = "" if self.share is None else f" ({self.share:.2%})"
        short = f"; {self.too_short:,} of fewer than {SHORTEST_WORDS} words not checked" if self.too_short else ""
        return f"{self.file}: {self.overlapping:,} of {self.checked:,} examples{share}{short}"


@dataclass(frozen=True)
class EvaluationFiles:
    """Evaluation files to compare the text with.

    Attributes:
        paths: the files.
        fields: fields or columns to read, which each file must have; empty: all of them.
    """

    paths: Sequence[Path]
    fields: Sequence[str] = ()


class _WordCharacters(dict[int, str | None]):
    """What each character becomes before a text is split at spaces."""

    def __missing__(self, code: int) -> str | None:
        character = chr(code)
        kind = unicodedata.category(character)
        # Chinese and Japanese put no spaces between words. Soft hyphens and joiners (Cf) stand inside a word.
        ideograph = 0x3040 <= code <= 0x30FF or 0x3400 <= code <= 0x9FFF or 0xF900 <= code <= 0xFAFF or code >= 0x20000
        letter = f" {character} " if ideograph else character
        self[code] = None if kind == "Cf" else letter if kind[0] in "LMN" else " "
        return self[code]


_CHARACTERS = _WordCharacters()


def words_of(text: str) -> list[str]:
    """The lower-cased words of a text: runs of letters, marks and digits; each Chinese character or kana is a word."""
    return unicodedata.normalize("NFC", text).lower().translate(_CHARACTERS).split()


def ngram_hashes(words: UInt[np.ndarray, " W"], sizes: range) -> Iterator[UInt[np.ndarray, " _"]]:
    """For each size of n-grams, at least 2, the hash of the n-gram that begins at each word.

    With 64 bits, a billion words against a million n-grams give a wrong match with a probability of 1 in 10,000.

    Args:
        words: pseudo-random values of the words.
    """
    total = words
    for size in range(2, sizes.stop):
        total = total[:-1] * 0xD6E8FEB86659FD93 + words[size - 1 :]
        if size in sizes:
            yield total


def read_examples(path: Path, fields: Sequence[str]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The examples of a file: lines of text, rows of a table, or objects.

    Args:
        fields: fields or columns to read; empty: all of them.

    Yields:
        The line where the example begins, in a JSON array or Parquet its number, and its texts: the line, the fields of the row,
        or the strings of the object at any depth.

    Raises:
        DataError: the file is missing, empty, damaged or of another format.
        ConfigError: it lacks one of the fields.
    """
    table = open_table(path)
    for field in fields:
        table.require(field, "--against-field")
    if table.format == "jsonl" and suffix_of(path) == ".json" and len(table.sample()) == 1:
        # Counted as one example, a whole file such as SQuAD's would have a share of 0 or 1.
        raise one_object(str(path))
    if table.format in ("csv", "tsv") and not is_header(table.columns):
        yield 1, table.columns  # a table without a header, such as CoLA's
    for row in table.rows:
        texts = tuple(_strings([row.values.get(field) for field in fields or row.values]))
        if table.format != "text" or texts[0].strip():
            yield row.number, texts


def _strings(value: Any) -> Iterator[str]:
    """The strings in a JSON value, at any depth, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(item)


class ContaminationSearch:
    """The n-grams of evaluation files, and which of them were found in the text so far.

    The number of an n-gram is the rank of its hash. Memory depends on the evaluation files only.

    Args:
        files: the evaluation files, which are read at once.

    Raises:
        DataError: a file is missing, empty, damaged or of an unknown format.
        ConfigError: a file lacks a field.
    """

    def __init__(self, files: EvaluationFiles) -> None:
        self._paths = files.paths
        self._lines, self._files = array("q"), array("q")  # of each example
        self._word_ids: dict[str, int] = {}  # from 1
        words, sizes, examples = array("Q"), array("q"), array("q")
        for file, path in enumerate(files.paths):
            for line, texts in read_examples(path, files.fields):
                for text in texts:
                    text_words = words_of(text)
                    length = len(text_words)
                    if length >= SHORTEST_WORDS:
                        size = min(length, NGRAM_WORDS)
                        words.extend([self._word_ids.setdefault(word, len(self._word_ids) + 1) for word in text_words])
                        sizes.extend([size] * (length - size + 1) + [0] * (size - 1))
                        examples.extend([len(self._lines)] * length)
                self._lines.append(line)
                self._files.append(file)
        # For each word: the example that it is in, and number and size of the n-gram that begins with it. The size is 0 if too
        # few words of the same text follow; such a word has the hash 0, which no n-gram of the text has.
        self._words = np.array(words, dtype=np.uint64)
        self._sizes, self._examples = np.array(sizes), np.array(examples)
        hashes = np.zeros(len(words), dtype=np.uint64)
        for size, size_hashes in zip(_SIZES, ngram_hashes(splitmix64(self._words), _SIZES), strict=True):
            (positions,) = np.nonzero(self._sizes == size)
            hashes[positions] = size_hashes[positions]
        self._hashes, self._ngrams = np.unique(hashes, return_inverse=True)
        # A table of the first 22 bits of the hashes decides most positions without a search.
        self._is_prefix = np.zeros(1 << 22, dtype=bool)
        self._is_prefix[self._hashes >> 42] = True
        self._matches: dict[Any, tuple[Any, ...]] = {}

    def find(self, documents: Sequence[Document | None]) -> dict[int, tuple[int, str]]:
        """The numbers of the n-grams in some documents, in the order of the text; called in the worker processes.

        Args:
            documents: the documents; None where a filter left one out.

        Returns:
            For each n-gram, the index of the first document that has it, and the beginning of that document.
        """
        id_of, known = self._word_ids.get, self._hashes
        ids, ends, beginnings = array("Q"), [], []
        for document in documents:
            sentences = document or []
            for sentence in sentences:  # one by one, as text in ASCII is faster
                ids.extend([id_of(word, _OTHER_WORD) for word in words_of(sentence)])
            ids.append(_OTHER_WORD)  # no n-gram reaches across the end of a document
            ends.append(len(ids))
            beginnings.append(" ".join(sentences)[:80])
        matches: list[tuple[int, int]] = []
        for hashes in ngram_hashes(splitmix64(np.array(ids, dtype=np.uint64)), _SIZES):
            (positions,) = np.nonzero(self._is_prefix[hashes >> 42])
            ngrams = np.searchsorted(known, hashes[positions], side="right") - 1
            equal = known[ngrams] == hashes[positions]
            matches += zip(positions[equal].tolist(), ngrams[equal].tolist(), strict=True)
        found: dict[int, tuple[int, str]] = {}
        for position, ngram in sorted(matches):
            index = bisect_right(ends, position)
            found.setdefault(ngram, (index, beginnings[index]))
        return found

    def add(self, matches: Iterable[tuple[int, str, int, str]]) -> None:
        """Add the n-grams found in the documents that follow; of each, the first document counts.

        Args:
            matches: of each n-gram, in the order of the text, its number, the name of the input, the number of the document in
                it, from 1, and the beginning of the document.
        """
        for ngram, *document in matches:
            self._matches.setdefault(ngram, tuple(document))

    def results(self) -> tuple[FileOverlap, ...]:
        """The overlap of each file with the documents so far."""
        # The first n-gram of each example, in the order of the documents, then of the evaluation files
        documents = {document: number for number, document in enumerate(dict.fromkeys(self._matches.values()))}
        (hits,) = np.nonzero(np.isin(self._ngrams, list(self._matches)))
        first_hits: dict[Any, Any] = {}
        for hit in sorted(hits, key=lambda hit: documents[self._matches[self._ngrams[hit]]]):
            first_hits.setdefault(self._examples[hit], hit)

        vocabulary, overlaps = ["", *self._word_ids], []
        checked = Counter(self._files[example] for example in np.unique(self._examples))
        for file, path in enumerate(self._paths):
            file_hits = [hit for example, hit in first_hits.items() if self._files[example] == file]
            num_examples, num_checked = self._files.count(file), checked[file]
            found = []
            for hit in file_hits[:5]:
                source, number, beginning = self._matches[self._ngrams[hit]]
                found.append(
                    FoundExample(
                        line=self._lines[self._examples[hit]],
                        words=" ".join(vocabulary[word] for word in self._words[hit : hit + self._sizes[hit]]),
                        input=source,
                        document=number,
                        begins=beginning,
                    )
                )
            overlaps.append(
                FileOverlap(
                    file=str(path),
                    examples=num_examples,
                    checked=num_checked,
                    too_short=num_examples - num_checked,
                    overlapping=len(file_hits),
                    share=len(file_hits) / num_checked if num_checked else None,
                    found=tuple(found),
                )
            )
        return tuple(overlaps)
