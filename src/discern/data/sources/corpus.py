"""Finds the input files and reads their documents.

The format of a file is detected from its content. Inputs are read in the order given, the files of a folder or pattern sorted
by path, and the members of an archive in their order there. Files and folders whose names begin with a dot are skipped, and so
are data sets, runs and models. Archives are read as streams and never unpacked to disk, so the names of their members cannot do
any harm.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from discern.data.remote import ResumingStream, is_remote, open_remote, remote_file, remote_files, shown
from discern.data.sources.base import ReadContext, named_source, read_stream
from discern.data.sources.documents import CorpusOptions, Document
from discern.data.sources.problems import ProblemLog
from discern.data.sources.streams import CountingStream, Expansion, PipeStream, naming
from discern.errors import ConfigError, DataError, DiscernError
from discern.progress import Progress
from discern.storage.output import is_kept_whole, listed

_STEP_BYTES = 1 << 20


@dataclass(frozen=True)
class Input:
    """One input: a file, standard input, or an input given by name, such as a data set of the hub.

    Attributes:
        name: path or name of the input, used in messages.
        path: path of a file; None for standard input and inputs given by name.
        explicit: whether the user named the input rather than a folder or pattern. It must then be readable as text.
        size: size in bytes; None if unknown.
        version: what tells this content from another of the same size: when the file was modified (UTC), or the ETag or the time
            that a server gives; None if unknown.
        address: address of a file on a server or in an object store; None otherwise.
    """

    name: str
    path: Path | None
    explicit: bool
    size: int | None
    version: str | None = None
    address: str | None = None

    def now(self) -> Input:
        """The input as it is at this time.

        Raises:
            DataError: it does not exist any more.
        """
        if self.path is not None:
            with naming(self.name):
                size, version = _state_of(self.path.stat())
        elif self.address is not None:
            found = remote_file(self.address)
            size, version = found.size, found.version
        else:
            return self
        return replace(self, size=size, version=version)


class Corpus:
    """The documents of some inputs. Every reading gives the same documents.

    Args:
        inputs: files, folders, glob patterns, addresses (`https://`, `s3://`, `gs://`, `hf://`), `-` or `hf:NAME`.
        options: how text becomes documents.
        exclude: folder that is not input although it may lie in one: the output folder.

    Attributes:
        left_out: folders that were skipped because they are data sets, runs or models.

    Raises:
        DataError: an input does not exist or contains no file.
    """

    def __init__(self, inputs: Sequence[str], options: CorpusOptions, exclude: Path | None = None) -> None:
        self.options = options
        search = _Search(exclude.resolve() if exclude is not None else None)
        self.inputs = [found for text in inputs for found in _inputs(text, search)]
        self.left_out = tuple(search.left_out)
        if sum(item.name == "-" for item in self.inputs) > 1:
            raise ConfigError("'-' (standard input) can be given only once")

    @classmethod
    def of(cls, inputs: Sequence[Input], options: CorpusOptions) -> Corpus:
        """The documents of inputs that were found before."""
        corpus = cls((), options)
        corpus.inputs = list(inputs)
        return corpus

    @property
    def note(self) -> str | None:
        """What the user should know about folders that were skipped; None if there are none."""
        if not self.left_out:
            return None
        return f"left out, as they are data sets, runs or models: {listed(list(map(str, self.left_out)))}"

    @property
    def total_bytes(self) -> int | None:
        """Size of the input in bytes as stored; None if unknown."""
        sizes = [item.size for item in self.inputs]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def rereadable(self) -> bool:
        """Whether the input can be read twice."""
        return all(item.path is None or item.path.is_file() for item in self.inputs) and not any(
            item.name == "-" for item in self.inputs
        )

    def documents(
        self,
        problems: ProblemLog,
        count_bytes: Callable[[int], None] = lambda _: None,
        errors: list[DiscernError] | None = None,
        begin: Callable[[str], None] = lambda _: None,
    ) -> Iterator[Document]:
        """Every document in order.

        Args:
            problems: collects problems that do not stop the work.
            count_bytes: called with the number of bytes of each read.
            errors: collects errors, after which the next input is read; if None, errors are raised.
            begin: called with the name of each input before its first document.

        Raises:
            DataError: an input cannot be read, is damaged, or is not text although the user named it.
            ConfigError: the records have no such field, or an optional package is missing.
        """
        for item in self.inputs:
            begin(item.name)
            expansion = Expansion(item.name)
            context = ReadContext(item.name, item.explicit, self.options, problems, expansion)
            try:
                if item.path is None and item.address is None and (source := named_source(item.name)) is not None:
                    yield from source.documents(item.name.partition(":")[2], context)
                else:
                    with naming(item.name), closing(_open(item)) as file:
                        counted = CountingStream(CountingStream(file, count_bytes), expansion.count_read)
                        yield from read_stream(counted, context)
            except DiscernError as error:
                if errors is None:
                    raise
                errors.append(error)


class _Search:
    """Finds the files in folders.

    Args:
        excluded: folder that is not input, with its links resolved.

    Attributes:
        left_out: folders that were skipped because they are data sets, runs or models.
    """

    def __init__(self, excluded: Path | None) -> None:
        self.left_out: list[Path] = []
        self._excluded = excluded
        self._has_text: dict[Path, bool] = {}

    def has_text(self, folder: Path) -> bool:
        """Whether the files of a folder are input."""
        if folder not in self._has_text:
            place = folder.resolve()
            excluded = self._excluded is not None and (place == self._excluded or self._excluded in place.parents)
            inside = any(parent in self.left_out for parent in folder.parents)
            kept = not excluded and not inside and is_kept_whole(folder)
            if kept:
                self.left_out.append(folder)
            self._has_text[folder] = not (excluded or inside or kept)
        return self._has_text[folder]

    def below(self, folder: Path) -> list[Path]:
        """The regular files below a folder, sorted by path. Links are followed, but to each folder only once."""
        found: list[Path] = []
        visited: set[tuple[int, int]] = set()
        for parent, folders, files in os.walk(folder, onerror=_refuse, followlinks=True):
            state = os.stat(parent)
            if (state.st_dev, state.st_ino) in visited:
                folders.clear()
                continue
            visited.add((state.st_dev, state.st_ino))
            # In order, so that of two links to a folder the same one is followed everywhere.
            folders[:] = [name for name in sorted(folders) if not name.startswith(".") and self.has_text(Path(parent) / name)]
            found += [Path(parent) / name for name in files if not name.startswith(".")]
        return sorted((path for path in found if path.is_file()), key=lambda path: path.parts)

    def matching(self, pattern: str) -> Iterator[Path]:
        """The files that match a pattern, and those below the folders that match it, each once."""
        seen: set[str] = set()
        fixed = len(Path(re.split(r"[*?\[]", pattern)[0] + "x").parent.parts)  # folders that the user named
        for match in map(Path, sorted(glob.glob(pattern, recursive=True))):
            # From the outside in, as a folder is left out with all that is below it.
            around = [parent for parent in reversed(match.parents) if len(parent.parts) > fixed]
            if not all(self.has_text(each) for each in [*around, match if match.is_dir() else match.parent]):
                found = []
            elif match.is_dir():
                found = self.below(match)
            else:
                found = [match] if match.exists() else []
            for path in found:
                place = os.path.abspath(path)
                if place not in seen:
                    seen.add(place)
                    yield path


def _inputs(text: str, search: _Search) -> Iterator[Input]:
    if is_remote(text):
        for found in remote_files(text):
            yield Input(shown(found.address), None, found.address == text, found.size, found.version, found.address)
        return
    if text == "-" or named_source(text) is not None:
        yield Input(text, None, True, None)
        return
    path = Path(text)
    if path.is_dir():
        yield from _folder(path, search)
    elif path.exists():
        yield Input(text, path, True, *_state_of(path.stat()))
    elif glob.has_magic(text):
        match = None
        for match in search.matching(text):
            yield Input(str(match), match, False, *_state_of(match.stat()))
        if match is None:
            raise DataError(f"no file matches the pattern {text}", hint="quote the pattern if the shell should not expand it")
    else:
        raise DataError(
            f"input {text} does not exist", hint="give a file, a folder, a pattern in quotes, an address, '-' or hf:NAME"
        )


def _folder(folder: Path, search: _Search) -> Iterator[Input]:
    """The files below a folder that the user named."""
    if is_kept_whole(folder):
        raise DataError(f"{folder} is a data set, a run or a model, not text", hint="give the text that it was made from")
    found = search.below(folder)
    if not found:
        raise DataError(f"folder {folder} contains no files", hint="give a folder with text files, or the files themselves")
    for path in found:
        yield Input(str(path), path, False, *_state_of(path.stat()))


def _state_of(found: os.stat_result) -> tuple[int | None, str | None]:
    """The size of a regular file, and when it was modified: in microseconds, which network file systems keep, too."""
    if not stat.S_ISREG(found.st_mode):
        return None, None
    return found.st_size, str(np.datetime64(found.st_mtime_ns // 1000, "us"))


def _refuse(problem: OSError) -> None:
    raise DataError(f"{problem.filename} cannot be read: {problem.strerror}") from problem


def _open(item: Input) -> BinaryIO | PipeStream | ResumingStream:
    if item.address is not None:
        return open_remote(item.address)
    place = sys.stdin.fileno() if item.path is None else item.path
    file = open(place, "rb", closefd=item.path is not None)  # noqa: SIM115 (the caller closes it)
    return file if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else PipeStream(file)


class CorpusProgress:
    """Reads a corpus once, with a progress bar in bytes of the input.

    Attributes:
        bytes_read, documents, sentences, characters: counts of what has been read so far.
    """

    def __init__(self, progress: Progress, description: str, corpus: Corpus) -> None:
        self.bytes_read = self.documents = self.sentences = self.characters = 0
        self._corpus = corpus
        self._progress = progress
        self._shown = 0
        self._inputs: list[str] = []
        self._firsts: list[int] = []
        progress.start(description, corpus.total_bytes, "bytes")

    def read(self, problems: ProblemLog, errors: list[DiscernError] | None = None) -> Iterator[Document]:
        """The documents of the corpus; see `Corpus.documents`."""
        for document in self._corpus.documents(problems, self._count, errors, self._begin):
            self.documents += 1
            self.sentences += len(document)
            self.characters += sum(map(len, document))
            yield document

    def locate(self, index: int) -> tuple[str, int]:
        """The name of the input of a document that has been read, and the number of the document in it, from 1.

        Args:
            index: index of the document in the corpus.
        """
        place = bisect_right(self._firsts, index) - 1
        return self._inputs[place], index - self._firsts[place] + 1

    def show(self, **metrics: str) -> None:
        """Move the bar to the current position, at most once per megabyte."""
        if self.bytes_read - self._shown >= _STEP_BYTES:
            self._move(metrics)

    def finish(self, **metrics: str) -> None:
        """Finish the bar at the end of the corpus."""
        self._move(metrics)
        self._progress.finish()

    def _move(self, metrics: dict[str, str]) -> None:
        self._progress.advance(self.bytes_read - self._shown, **metrics)
        self._shown = self.bytes_read

    def _begin(self, name: str) -> None:
        self._inputs.append(name)
        self._firsts.append(self.documents)

    def _count(self, size: int) -> None:
        self.bytes_read += size
