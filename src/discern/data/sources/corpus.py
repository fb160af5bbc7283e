"""Finds the input files and reads their documents.

The format of a file is detected from its content. Inputs are read in the order given, the files of a folder or pattern sorted
by path, and the members of an archive in their order there. Files and folders whose names begin with a dot are skipped, and so
are data sets, runs and models. Archives are read as streams and never unpacked to disk, so the names of their members cannot do
any harm.
"""

from __future__ import annotations

import glob
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from discern.data.remote import ResumingStream, is_remote, remote_file, remote_files, shown
from discern.data.sources.documents import CorpusOptions, Document, ProblemLog
from discern.data.sources.formats import ReadContext, hub_documents, read_stream
from discern.data.sources.streams import blocks, naming, opened
from discern.errors import DataError, DiscernError
from discern.progress import Progress
from discern.storage.files import is_kept_whole, listed

_ARROW_RECORDS = ("state.json", "dataset_info.json", "dataset_dict.json")
"""What `datasets.save_to_disk` writes beside the data."""


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
    size: int | None = None
    version: str | None = None
    address: str | None = None

    def now(self) -> Input:
        """The input with its size and version at this time.

        Raises:
            DataError: it does not exist any more.
        """
        if self.address is not None:
            remote = remote_file(self.address)
            return replace(self, size=remote.size, version=remote.version)
        if self.path is None:
            return self
        with naming(self.name):
            found = self.path.stat()
        if not stat.S_ISREG(found.st_mode):
            return self
        # In microseconds, which network file systems keep, too.
        return replace(self, size=found.st_size, version=str(np.datetime64(found.st_mtime_ns // 1000, "us")))


class Corpus:
    """The documents of some inputs. Every reading gives the same documents.

    Args:
        inputs: files, folders, glob patterns, addresses (`https://`, `s3://`, `gs://`, `hf://`), `-` or `hf:NAME`; or inputs that
            were found before.
        options: how text becomes documents.
        exclude: folder that is not input although it may lie in one: the output folder.

    Attributes:
        inputs: the inputs that were found.
        note: what the user should know about folders that were skipped; None if there are none.

    Raises:
        ConfigError: an address contains a password, or an optional package is missing.
        DataError: an input does not exist or contains no file.
    """

    def __init__(self, inputs: Sequence[str | Input], options: CorpusOptions, exclude: Path | None = None) -> None:
        self.options = options
        search = _Search(options, exclude)
        self.inputs = [found for item in inputs for found in ([item] if isinstance(item, Input) else search.inputs(item))]
        names = [*map(str, search.left_out)]
        self.note = f"left out, as they are data sets, runs or models: {listed(names)}" if names else None

    @property
    def total_bytes(self) -> int | None:
        """Size of the input in bytes as stored; None if unknown."""
        sizes = [item.size for item in self.inputs]
        return None if None in sizes else sum(filter(None, sizes))

    @property
    def rereadable(self) -> bool:
        """Whether the input can be read twice."""
        return all(item.name != "-" and (item.path is None or item.path.is_file()) for item in self.inputs)

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
            context = ReadContext(item.name, item.explicit, self.options, problems)
            try:
                if item.path is None and item.address is None and item.name != "-":
                    yield from hub_documents(context)
                else:
                    yield from _read(item, context, count_bytes)
            except DiscernError as error:
                if errors is None:
                    raise
                errors.append(error)

    def read(self, progress: Progress, description: str) -> Iterator[Document]:
        """Every document in order, with a progress bar in bytes of the input."""
        progress.start(description, self.total_bytes, "bytes")
        yield from self.documents(ProblemLog(), progress.advance)
        progress.finish()


def _read(item: Input, context: ReadContext, count_bytes: Callable[[int], None]) -> Iterator[Document]:
    """The documents of a file or of standard input."""
    with naming(item.name):
        if item.address is not None:
            file: Any = ResumingStream(item.address)
        else:
            file = open(item.path or sys.stdin.fileno(), "rb", closefd=item.path is not None)  # noqa: SIM115 (closed below)
        with closing(file):
            yield from read_stream(opened(blocks(file, count_bytes)), context)


class _Search:
    """Finds the files of inputs.

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
        """The files of an input as the user gave it."""
        path = Path(text)
        if is_remote(text):
            for remote in remote_files(text):
                is_named = remote.address == text
                if is_named or not self._options.excludes(remote.address):
                    yield Input(shown(remote.address), None, is_named, remote.size, remote.version, remote.address)
        elif text == "-" or text.startswith("hf:"):
            yield Input(text, None, True)
        elif is_kept_whole(path):
            raise DataError(f"{path} is a data set, a run or a model, not text", hint="give the text that it was made from")
        elif path.is_dir() or (glob.has_magic(text) and not path.exists()):
            files = self._files(text)
            if not files:
                what = f"folder {path} contains no files" if path.is_dir() else f"no file matches the pattern {text}"
                raise DataError(what, hint="check the path and --exclude; quote a pattern if the shell should not expand it")
            for file in files:
                yield Input(str(file), file, False).now()
        elif path.exists():
            yield Input(text, path, True).now()
        else:
            raise DataError(
                f"input {text} does not exist", hint="give a file, a folder, a pattern in quotes, an address, '-' or hf:NAME"
            )

    def _files(self, text: str) -> list[Path]:
        """The files below a folder, or that match a pattern or are below a folder that matches, each once."""
        top = Path(text) if Path(text).is_dir() else Path(re.split(r"[*?\[]", text)[0] + "x").parent  # as the user named it
        matches = [top] if top == Path(text) else map(Path, sorted(glob.glob(text, recursive=True)))
        files: dict[Path, None] = {}
        visited: set[Path] = set()
        for match in matches:
            # From the outside in, as a folder is left out with all that is below it.
            if all(self._has_input(folder) for folder in reversed(match.parents) if folder.is_relative_to(top)):
                for file in self._below(match, visited) if match.is_dir() else [match]:
                    if file.exists() and not self._options.excludes(str(file.relative_to(top))):
                        files[file] = None
        return list(files)

    def _has_input(self, folder: Path) -> bool:
        """Whether the files of a folder are input."""
        if folder not in self._is_input:
            is_output = self._output is not None and folder.resolve().is_relative_to(self._output)
            is_kept = not is_output and is_kept_whole(folder)
            self.left_out += [folder] if is_kept else []
            self._is_input[folder] = not is_output and not is_kept
        return self._is_input[folder]

    def _below(self, folder: Path, visited: set[Path]) -> Iterator[Path]:
        """The files below a folder, sorted by path. Links are followed, but to each folder only once."""
        place = folder.resolve()
        if place in visited or not self._has_input(folder):
            return
        visited.add(place)
        with naming(str(folder)):
            entries = sorted(folder.iterdir())
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from self._below(entry, visited)
            elif entry.is_file() and entry.name not in _ARROW_RECORDS:
                yield entry
