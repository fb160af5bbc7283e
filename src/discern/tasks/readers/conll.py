"""Tagged sentences in CoNLL columns: chunking, named entities, and Weibo NER with one Chinese character per line.

The files have one word per line, columns separated by tabs or spaces, and a blank line between sentences. `-DOCSTART-` lines
separate documents and are not words.
"""

from __future__ import annotations

import re
from pathlib import Path

from discern.data.sources.documents import ProblemLog
from discern.data.tables import numbered_lines, suffix_of
from discern.errors import ConfigError, DataError
from discern.tasks.base import Reading, TaggingExample, tag_counts
from discern.tasks.tags import detect_scheme

# Multiword tokens (1-2) and empty nodes (8.1) of CoNLL-U, which are not words of the sentence.
_NOT_A_WORD = re.compile(r"\d+[-.]\d+")
# The position of a character in its word, which follows the character in Weibo NER's raw files.
_POSITION = re.compile(r"(?<=.)\d+$", re.DOTALL)


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
        DataError: there are no sentences, a word or tag is empty, or lines have different numbers of columns.
    """
    problems = ProblemLog()
    universal = suffix_of(path) == ".conllu"
    lines = list(numbered_lines(path))

    # The form of the lines that are certainly words: a line that begins with "# " may be a comment or the word "#".
    mark = "#" if universal else "# "
    plain = [(number, line) for number, line in lines if line.strip(" \t") and not line.startswith((mark, "-DOCSTART-"))]
    separator = re.compile("\t" if any("\t" in line for _, line in plain) else " +")
    if not plain:
        raise DataError(
            f"{path} has no sentences",
            hint="expected one word per line, its tag in the last column, and blank lines between sentences",
        )
    first = plain[0][0]
    width = len(separator.split(plain[0][1].strip(" ")))
    endings = {separator.split(line.strip(" "))[-1] for _, line in plain}

    columns = [word_column] if tag_column is None else [word_column, tag_column]
    for column, what in zip(columns, ("word", "tag"), strict=False):
        if not -width <= column < width:
            raise ConfigError(
                f"{path} has {width} columns, but no {what} column {column}",
                hint=f"choose 0 to {width - 1}, or -1 for the last",
            )

    # Read the sentences: the word and the tag of each line.
    sentences: list[list[tuple[str, ...]]] = []
    places: list[str] = []
    sentence: list[tuple[str, ...]] = []
    for number, line in lines:
        place = f"{path}:{number}"
        if not line.strip(" \t") or line.startswith("-DOCSTART-"):
            sentence = []
            continue
        fields = separator.split(line.strip(" "))
        if line.startswith(mark) and (universal or len(fields) != width or (not sentence and fields[-1] not in endings)):
            problems.add("comment line, left out", place)
            continue
        if len(fields) != width:
            raise DataError(
                f"{place} has {len(fields)} columns, but line {first} has {width}: {line[:60]!r}",
                hint="every word needs the same number of columns; a blank line separates sentences",
            )
        if universal and _NOT_A_WORD.fullmatch(fields[0]):
            problems.add("line of CoNLL-U that is not a word, left out", place)
            continue
        values = tuple(fields[column].strip(" \t") for column in columns)  # other white space may be a word
        if not all(values):
            raise DataError(f"{place}: an empty column: {line[:60]!r}", hint="every word needs a tag, 'O' if it is in no span")
        if not sentence:
            sentences.append(sentence)
            places.append(place)
        sentence.append(values)

    notes = []
    if characters and all(_POSITION.search(word) for sentence in sentences for word, *_ in sentence):
        sentences = [[(_POSITION.sub("", word), *tag) for word, *tag in sentence] for sentence in sentences]
        notes.append("the numbers after the characters (their positions in words) are removed")
    examples = tuple(TaggingExample(str(number), *zip(*sentence, strict=True)) for number, sentence in enumerate(sentences))
    if tag_column is not None:
        scheme = detect_scheme(example.tags or () for example in examples)
        kinds = len(tag_counts(examples))
        notes.append(f"{kinds} tags that mark no spans" if scheme == "none" else f"{kinds} tags in scheme {scheme.upper()}")
    return Reading(examples, str(path), problems.summary(), tuple(notes), tuple(places))
