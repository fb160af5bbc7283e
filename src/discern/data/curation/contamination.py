"""Overlap of training text with evaluation sets: examples that share thirteen words in a row with the text.

Reference: Brown et al. 2020 (GPT-3), appendix C: 13-grams of lower-cased words without punctuation, and at least 8 words.
Differs: there, n is one number for each data set, the 5th percentile of the lengths of its examples; here an example of 8 to
12 words is looked for as a whole.
"""

from __future__ import annotations

import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, UInt

from discern.config.schema import Section
from discern.data.sources.documents import Document
from discern.data.tables import is_header, one_object, open_table, suffix_of
from discern.errors import ConfigError, DataError

NGRAM_WORDS = 13
"""Number of words in a row that count as overlap."""
SHORTEST_WORDS = 8
"""A text of fewer words is not checked: too many are common phrases."""

_MAX_FOUND = 5
_SHOWN_CHARACTERS = 80


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
    found: tuple[FoundExample, ...] = ()

    def __str__(self) -> str:
        short = f"; {self.too_short:,} of fewer than {SHORTEST_WORDS} words not checked" if self.too_short else ""
        if self.share is None:
            return f"{self.file}: none of {self.examples:,} examples can be checked{short}"
        return f"{self.file}: {self.overlapping:,} of {self.checked:,} examples ({self.share:.2%}){short}"


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
        # They choose the look of an emoji, which is no word.
        selector = 0xFE00 <= code <= 0xFE0F or 0xE0100 <= code <= 0xE01EF or code == 0x20E3
        self[code] = None if kind == "Cf" or selector else letter if kind[0] in "LMN" else " "
        return self[code]


_CHARACTERS = _WordCharacters()


def words_of(text: str) -> list[str]:
    """The lower-cased words of a text: runs of letters, marks and digits; each Chinese character or kana is a word."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    return text.lower().translate(_CHARACTERS).split()


@dataclass(frozen=True)
class NgramIndex:
    """The n-grams of evaluation sets, to be found in text. They are numbered by length, then by hash.

    Attributes:
        word_ids: ids of the words that occur in them, from 1.
        hashes: by number of words, the distinct hashes, ascending.
    """

    word_ids: dict[str, int]
    hashes: dict[int, UInt[np.ndarray, " N"]]

    def __len__(self) -> int:
        return sum(map(len, self.hashes.values()))


@dataclass(frozen=True)
class Matches:
    """The n-grams found in some consecutive documents.

    Attributes:
        documents: number of documents that were searched.
        ngrams: numbers of the n-grams, distinct.
        owners: index of the first document with each of them.
        beginnings: beginnings of those documents, by index.
    """

    documents: int
    ngrams: Int[np.ndarray, " N"]
    owners: Int[np.ndarray, " N"]
    beginnings: dict[int, str]


class NgramFinder:
    """Finds n-grams in documents; runs in the worker processes.

    A word that no evaluation set has gets the id 0, as does the end of a document, so that no n-gram reaches across it.
    """

    # A table of this many entries for each n-gram decides most places without a search.
    _ENTRIES = 16
    _FEWEST_BITS, _MOST_BITS = 16, 24

    def __init__(self, index: NgramIndex) -> None:
        self._index = index
        self._shifts: dict[int, int] = {}
        self._tables: dict[int, Bool[np.ndarray, " _"]] = {}
        for length, hashes in index.hashes.items():
            bits = min(max((len(hashes) * self._ENTRIES).bit_length(), self._FEWEST_BITS), self._MOST_BITS)
            self._shifts[length] = 64 - bits
            self._tables[length] = np.zeros(1 << bits, dtype=bool)
            self._tables[length][hashes >> np.uint64(64 - bits)] = True

    def find(self, documents: Sequence[Document]) -> Matches:
        """The n-grams in some documents."""
        find = self._index.word_ids.get
        ids, ends = array("i"), []
        for document in documents:
            for sentence in document:  # one by one, as text in ASCII is faster
                ids.extend([find(word, 0) for word in words_of(sentence)])
            ids.append(0)
            ends.append(len(ids))
        numbers, places, before = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)], 0
        for length, found in _rolling(np.array(ids, dtype=np.int64), self._index.hashes):
            known = self._index.hashes[length]
            (likely,) = np.nonzero(self._tables[length][found >> np.uint64(self._shifts[length])])
            ranks = np.minimum(np.searchsorted(known, found[likely]), len(known) - 1)
            equal = known[ranks] == found[likely]
            distinct, first = np.unique(ranks[equal], return_index=True)
            numbers.append(distinct + before)
            places.append(likely[equal][first])
            before += len(known)
        owners = np.searchsorted(np.array(ends, dtype=np.int64), np.concatenate(places), side="right")
        beginnings = {
            int(owner): " ".join(documents[owner][:_SHOWN_CHARACTERS])[:_SHOWN_CHARACTERS] for owner in np.unique(owners)
        }
        return Matches(len(documents), np.concatenate(numbers), owners, beginnings)


def _rolling(ids: Int[np.ndarray, " W"], lengths: Iterable[int]) -> Iterator[tuple[int, UInt[np.ndarray, " _"]]]:
    """For each of the lengths, ascending, the hash of the words from each place on.

    With 64 bits and pseudo-random values of the words, a billion words against a million n-grams give a wrong match with a
    probability of 1 in 10,000.
    """
    # splitmix64: neighboring ids get unrelated values.
    values = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    wanted = sorted(lengths)
    total = values
    for length in range(1, wanted[-1] + 1 if wanted else 0):
        if length > 1:
            total = total[:-1] * np.uint64(0xD6E8FEB86659FD93) + values[length - 1 :]
        if length in wanted:
            # The table of the finder reads the upper bits, so they must depend on every bit.
            mixed = (total ^ (total >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
            yield length, mixed


@dataclass(frozen=True)
class Example:
    """An example of an evaluation file.

    Attributes:
        line: line of the file where it begins, from 1; in a JSON array or Parquet its number.
        texts: its texts: the line, the fields of the row, or the strings of the object at any depth.
    """

    line: int
    texts: tuple[str, ...]


def read_examples(path: Path, fields: Sequence[str] = ()) -> Iterator[Example]:
    """The examples of a file: lines of text, rows of a table, or objects.

    Args:
        fields: fields or columns to read; empty: all of them.

    Raises:
        DataError: the file is missing, empty, damaged or of another format.
        ConfigError: it lacks one of the fields.
    """
    if path.is_dir():
        raise DataError(
            f"{path} is a folder, expected a file with examples", hint="name each file: --against FILE --against FILE"
        )
    table = open_table(path)
    if fields and table.format == "text":
        raise ConfigError(f"{path} is plain text and has no field '{fields[0]}'", hint="leave out --against-field for it")
    for field in fields:
        table.require(field, "--against-field")
    count = 0
    if table.format in ("csv", "tsv") and not is_header(table.columns):
        count = 1
        yield Example(1, table.columns)  # a table without a header, such as CoLA's
    for row in table.rows:
        chosen = [row.values[field] for field in fields if field in row.values] if fields else [row.values]
        texts = tuple(text for value in chosen for text in _strings(value))
        if table.format != "text" or texts[0].strip():
            count += 1
            yield Example(row.number, texts)
    if count == 0:
        raise DataError(f"{path} has no examples", hint="expected rows below the header")
    if count == 1 and table.format == "jsonl" and suffix_of(path) == ".json":
        # Counted as one example, a whole file such as SQuAD's would have a share of 0 or 1.
        raise one_object(str(path))


def _strings(value: Any) -> Iterator[str]:
    """The strings in a JSON value, at any depth, in order."""
    stack = [value]
    while stack:
        last = stack.pop()
        if isinstance(last, str):
            yield last
        elif isinstance(last, Mapping):
            stack.extend(reversed(list(last.values())))
        elif isinstance(last, list):
            stack.extend(reversed(last))


class OverlapSearch:
    """The evaluation files, and what of them was found in the text so far. Memory depends on the evaluation files only.

    Args:
        files: the evaluation files, which are read at once.

    Raises:
        DataError: a file is missing, empty, damaged or of an unknown format.
        ConfigError: a file lacks a field, or is given twice.
    """

    def __init__(self, files: EvaluationFiles) -> None:
        self._names = [str(path) for path in files.paths]
        if repeated := {name for name in self._names if self._names.count(name) > 1}:
            raise ConfigError(f"{min(repeated)} is given twice", hint="give each file of --against once")
        self._word_ids: dict[str, int] = {}
        self._lines = array("q")
        file_of, words, lengths, example_of = array("i"), array("i"), array("i"), array("i")
        for number, path in enumerate(files.paths):
            for example in read_examples(path, files.fields):
                for text in example.texts:
                    found = words_of(text)
                    if len(found) >= SHORTEST_WORDS:
                        words.extend([self._word_ids.setdefault(word, len(self._word_ids) + 1) for word in found])
                        lengths.append(len(found))
                        example_of.append(len(file_of))
                self._lines.append(example.line)
                file_of.append(number)
        self._file_of, self._words = np.array(file_of), np.array(words, dtype=np.int64)
        self._checked = np.unique(np.array(example_of, dtype=np.int64))
        self._index_ngrams(np.array(lengths, dtype=np.int64), np.array(example_of, dtype=np.int64))
        self._first = np.full(len(self.index), -1, dtype=np.int64)
        self._documents = 0
        self._found: list[list[FoundExample]] = [[] for _ in self._names]
        self._listed: set[int] = set()

    def _index_ngrams(self, lengths: Int[np.ndarray, " T"], example_of: Int[np.ndarray, " T"]) -> None:
        """Number the n-grams; for each place in an evaluation file where one begins, keep number, example and length."""
        sizes = np.minimum(lengths, NGRAM_WORDS)
        starts = np.cumsum(lengths) - lengths
        hashes: dict[int, np.ndarray] = {}
        none = np.zeros(0, dtype=np.int64)
        numbers, examples, places, spans = [none], [none], [none], [none]
        before = 0
        for size, found in _rolling(self._words, map(int, np.unique(sizes))):
            texts = sizes == size
            counts = lengths[texts] - size + 1
            within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            at = np.repeat(starts[texts], counts) + within
            hashes[size], ranks = np.unique(found[at], return_inverse=True)
            numbers.append(ranks + before)
            examples.append(np.repeat(example_of[texts], counts))
            places.append(at)
            spans.append(np.full(len(at), size))
            before += len(hashes[size])
        self.index = NgramIndex(self._word_ids, hashes)
        self._ngrams, self._examples = np.concatenate(numbers), np.concatenate(examples)
        self._places, self._spans = np.concatenate(places), np.concatenate(spans)

    def add(self, matches: Matches, locate: Callable[[int], tuple[str, int]]) -> None:
        """Take in the matches of the documents that follow.

        Args:
            locate: gives the input of a document, and its number there, from its index in the whole text.
        """
        new = self._first[matches.ngrams] < 0
        self._first[matches.ngrams[new]] = matches.owners[new] + self._documents
        if new.any() and any(len(found) < _MAX_FOUND for found in self._found):
            self._list(matches.ngrams[new], matches, locate)
        self._documents += matches.documents

    def _list(self, ngrams: Int[np.ndarray, " N"], matches: Matches, locate: Callable[[int], tuple[str, int]]) -> None:
        """List examples with these n-grams, in the order of the documents, then of the examples."""
        fresh = np.zeros(len(self._first), dtype=bool)
        fresh[ngrams] = True
        full = np.array([len(found) >= _MAX_FOUND for found in self._found])
        (at,) = np.nonzero(fresh[self._ngrams])
        at = at[~full[self._file_of[self._examples[at]]]]
        vocabulary = list(self._word_ids) if len(at) else []
        for place in at[np.lexsort((self._places[at], self._first[self._ngrams[at]]))]:
            example = int(self._examples[place])
            listed = self._found[self._file_of[example]]
            if example in self._listed or len(listed) >= _MAX_FOUND:
                continue
            document = int(self._first[self._ngrams[place]])
            source, number = locate(document)
            span = self._words[self._places[place] :][: self._spans[place]]
            words = " ".join(vocabulary[word - 1] for word in span)
            begins = matches.beginnings[document - self._documents]
            listed.append(FoundExample(line=self._lines[example], words=words, input=source, document=number, begins=begins))
            self._listed.add(example)

    def results(self) -> tuple[FileOverlap, ...]:
        """The overlap of each file with the documents so far."""
        overlapping = np.unique(self._examples[self._first[self._ngrams] >= 0])
        files = len(self._names)
        totals, checked, hit = (
            np.bincount(owners, minlength=files).tolist()
            for owners in (self._file_of, self._file_of[self._checked], self._file_of[overlapping])
        )
        return tuple(
            FileOverlap(
                file=name,
                examples=totals[number],
                checked=checked[number],
                too_short=totals[number] - checked[number],
                overlapping=hit[number],
                share=hit[number] / checked[number] if checked[number] else None,
                found=tuple(self._found[number]),
            )
            for number, name in enumerate(self._names)
        )
