"""Counts what is read from a corpus, and shows it."""

from __future__ import annotations

from collections.abc import Iterator

from discern.data.corpus import Corpus
from discern.data.encoder import Document
from discern.data.problems import ProblemLog
from discern.errors import DiscernError
from discern.progress import Progress

_STEP_BYTES = 1 << 20


class Meter:
    """One pass over a corpus, with a progress bar in bytes of the input.

    Attributes:
        bytes_read, documents, sentences, characters: what has passed so far.
    """

    def __init__(self, progress: Progress, description: str, corpus: Corpus) -> None:
        self.bytes_read = self.documents = self.sentences = self.characters = 0
        self._corpus = corpus
        self._progress = progress
        self._shown = 0
        progress.start(description, corpus.total_bytes, "bytes")

    def read(self, problems: ProblemLog, errors: list[DiscernError] | None = None) -> Iterator[Document]:
        """The documents of the corpus; see `Corpus.documents`."""
        for document in self._corpus.documents(problems, self._count, errors):
            self.documents += 1
            self.sentences += len(document)
            self.characters += sum(map(len, document))
            yield document

    def show(self, **figures: str) -> None:
        """Move the bar to where the reading is, at most once a megabyte."""
        if self.bytes_read - self._shown >= _STEP_BYTES:
            self._move(figures)

    def finish(self, **figures: str) -> None:
        """The pass is over."""
        self._move(figures)
        self._progress.finish()

    def _move(self, figures: dict[str, str]) -> None:
        self._progress.advance(self.bytes_read - self._shown, **figures)
        self._shown = self.bytes_read

    def _count(self, size: int) -> None:
        self.bytes_read += size
