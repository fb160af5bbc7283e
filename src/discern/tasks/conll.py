"""Tagging from files of columns: chunking, named entities in CoNLL's format, and Weibo NER."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from discern.errors import ConfigError
from discern.tasks.base import Definition, Source, TaskConfig
from discern.tasks.examples import Reading, TaggingExample
from discern.tasks.readers.files import optional_split_file
from discern.tasks.readers.tagging import TAGGING_FILES, read_conll
from discern.tasks.tagging import Tagging, TaggingConfig

_METRICS = ("f1", "precision", "recall", "accuracy")
# Paper's released code: 256 tokens for chunking.
_DEFAULTS: dict[str, object] = {"task.sequence_length": 256}


@dataclass(frozen=True)
class ConllSource(Source[TaggingExample]):
    """Files of columns, found by the names that such corpora give them.

    Attributes:
        word_column, tag_column: from 0; negative ones count from the right.
        characters: a character a line, perhaps with its place in its word behind it.
    """

    word_column: int = 0
    tag_column: int = -1
    characters: bool = False

    def configured(self, config: TaskConfig) -> ConllSource:
        chosen = cast(TaggingConfig, config)
        return replace(self, word_column=chosen.word_column, tag_column=chosen.tag_column)

    def splits(self, folder: Path) -> dict[str, Path]:
        found = {split: optional_split_file(folder, names) for split, names in TAGGING_FILES.items()}
        return {split: path for split, path in found.items() if path is not None}

    def read(self, path: Path, split: str, *, labelled: bool = True) -> Reading[TaggingExample]:
        """The sentences of a file. Where the only column is that of the words, the sentences have no tags.

        Raises:
            ConfigError: there is no such column, or the words of a training file are its tags.
            DataError: as of `read_conll`.
        """
        tag_column = self.tag_column if labelled else None
        reading = read_conll(path, word_column=self.word_column, tag_column=tag_column, characters=self.characters)
        if not labelled or any(example.words != example.tags for example in reading.examples):
            return reading
        # The last column is also the first: a file of words alone.
        if split == "train":
            raise ConfigError(
                f"{path}: the column of the tags ({self.tag_column}) is that of the words ({self.word_column})",
                hint="a training file needs both; say which: --words N --tags M, of a named task --set task.word_column=N "
                "--set task.tag_column=M",
            )
        return self.read(path, split, labelled=False)


def _definition(name: str, source: ConllSource) -> Definition[TaggingExample]:
    # Where there is a dev file, which chooses, the test file is what papers report.
    return Definition(name, Tagging, source, _METRICS, defaults=_DEFAULTS, report_splits=("test",))


CHUNK = _definition("chunk", ConllSource())
NER = _definition("ner", ConllSource())
WEIBO_NER = _definition("weibo-ner", ConllSource(characters=True))
