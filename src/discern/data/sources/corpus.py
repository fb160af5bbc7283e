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

import numpy as np

from discern.data.object_stores import shown
from discern.data.remote import is_remote, open_remote, remote_file, remote_files
from discern.data.sources.documents import CorpusOptions, Document, ProblemLog
from discern.data.sources.formats import ReadContext, hub_documents, read_stream
from discern.data.sources.streams import Expansion, naming
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

    @property
    def is_on_hub(self) -> bool:
        """Whether this is a data set of the hub, `hf:NAME`."""
        return self.path is None and self.address is None and self.name != "-"

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
        search = _Search(options, exclude)
        self.inputs = [item for text in inputs for item in search.inputs(text)]
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
                if item.is_on_hub:
                    yield from hub_documents(context)
                    continue
                with naming(item.name):
                    file = (
                        open_remote(item.address)
                        if item.address is not None
                        # Unbuffered, so that what has arrived in a pipe is read.
                        else open(item.path or sys.stdin.fileno(), "rb", buffering=0, closefd=item.path is not None)  # noqa: SIM115
                    )
                    with closing(file):
                        yield from read_stream(expansion.stored(file, count_bytes), context)
            except DiscernError as error:
                if errors is None:
                    raise
                errors.append(error)


class _Search:
    """Finds the files in folders.

    Args:
        options: tell which files are left out.
        output: folder that is not input.

    Attributes:
        left_out: folders that were skipped because they are data sets, runs or models.
    """

    def __init__(self, options: CorpusOptions, output: Path | None) -> None:
        self.left_out: list[Path] = []
        self._options = options
        self._output = output.resolve() if output is not None else None
        self._is_input: dict[Path, bool] = {}

    def inputs(self, text: str) -> Iterator[Input]:
        """The files of an input, as the user gave it."""
        path = Path(text)
        if is_remote(text):
            for remote in remote_files(text):
                explicit = remote.address == text
                if explicit or not self._options.excludes(remote.address):
                    yield Input(shown(remote.address), None, explicit, remote.size, remote.version, remote.address)
        elif text == "-" or text.startswith("hf:"):
            yield Input(text, None, True, None)
        elif path.exists() and not path.is_dir():
            yield Input(text, path, True, *_state_of(path.stat()))
        elif path.is_dir() or glob.has_magic(text):
            if is_kept_whole(path):
                raise DataError(f"{path} is a data set, a run or a model, not text", hint="give the text that it was made from")
            files = self._below(path, path) if path.is_dir() else list(self._matching(text))
            if not files:
                what = f"folder {path} contains no files" if path.is_dir() else f"no file matches the pattern {text}"
                raise DataError(what, hint="check the path and --exclude; quote a pattern if the shell should not expand it")
            for file in files:
                yield Input(str(file), file, False, *_state_of(file.stat()))
        else:
            raise DataError(
                f"input {text} does not exist", hint="give a file, a folder, a pattern in quotes, an address, '-' or hf:NAME"
            )

    def _has_input(self, folder: Path) -> bool:
        """Whether the files of a folder are input."""
        if folder not in self._is_input:
            place = folder.resolve()
            is_output = self._output is not None and self._output in (place, *place.parents)
            is_kept = not is_output and is_kept_whole(folder)
            self.left_out += [folder] if is_kept else []
            self._is_input[folder] = not is_output and not is_kept
        return self._is_input[folder]

    def _below(self, folder: Path, top: Path) -> list[Path]:
        """The regular files below a folder, sorted by path. Links are followed, but to each folder only once."""
        files: list[Path] = []
        visited: set[tuple[int, int]] = set()
        for parent, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
            state = os.stat(parent)
            if (state.st_dev, state.st_ino) in visited:
                folders.clear()
                continue
            visited.add((state.st_dev, state.st_ino))
            # In order, so that of two links to a folder the same one is followed everywhere.
            folders[:] = [name for name in sorted(folders) if not name.startswith(".") and self._has_input(Path(parent, name))]
            files += [Path(parent, name) for name in names if not name.startswith(".")]
        kept = (path for path in files if path.is_file() and not self._options.excludes(str(path.relative_to(top))))
        return sorted(kept, key=lambda path: path.parts)

    def _matching(self, pattern: str) -> Iterator[Path]:
        """The files that match a pattern, and those below the folders that match it, each once."""
        seen: set[str] = set()
        top = Path(re.split(r"[*?\[]", pattern)[0] + "x").parent  # the folder that the user named
        for match in map(Path, sorted(glob.glob(pattern, recursive=True))):
            # From the outside in, as a folder is left out with all that is below it.
            around = [folder for folder in reversed(match.parents) if len(folder.parts) > len(top.parts)]
            around.append(match if match.is_dir() else match.parent)
            if not all(map(self._has_input, around)):
                continue
            is_file = match.exists() and not self._options.excludes(str(match.relative_to(top)))
            for path in self._below(match, top) if match.is_dir() else [match] if is_file else []:
                place = os.path.abspath(path)
                if place not in seen:
                    seen.add(place)
                    yield path


def _state_of(found: os.stat_result) -> tuple[int | None, str | None]:
    """The size of a regular file, and when it was modified: in microseconds, which network file systems keep, too."""
    if not stat.S_ISREG(found.st_mode):
        return None, None
    return found.st_size, str(np.datetime64(found.st_mtime_ns // 1000, "us"))


def _refuse(problem: OSError) -> None:
    raise DataError(f"{problem.filename} cannot be read: {problem.strerror}") from problem


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
            if isinstance(document, list):
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
