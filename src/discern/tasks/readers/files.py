"""Reading of task files: decompressed by content, decoded strictly, with the line in errors; and the files of splits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from discern.data.sources.streams import BLOCK_BYTES, Readable, likely_encoding, naming, open_text
from discern.errors import ConfigError, DataError, did_you_mean
from discern.parsing import json_value

# Suffixes of compression, which do not tell the format of the content.
COMPRESSED = frozenset({".gz", ".xz", ".zst", ".bz2"})
_LONGEST_LINE = 1 << 28


def suffix_of(path: Path) -> str:
    """The suffix of a file, ignoring suffixes of compression."""
    return next((end.lower() for end in reversed(path.suffixes) if end.lower() not in COMPRESSED), "")


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file, numbered from 1, without line ends. Only a newline ends a line.

    Raises:
        DataError: the file is missing, damaged or not UTF-8; the message names the line.
    """
    with naming(str(path)), path.open("rb") as file:
        yield from stream_lines(file, str(path))


def stream_lines(file: Readable, name: str) -> Iterator[tuple[int, str]]:
    """Like `numbered_lines`, for a stream such as standard input, with bounded memory."""
    for number, line in _whole_lines(file, name):
        yield number, (line.removeprefix("\ufeff") if number == 1 else line).removesuffix("\n").removesuffix("\r")


def _whole_lines(file: Readable, name: str) -> Iterator[tuple[int, str]]:
    """The lines with their ends and numbers, and with a byte order mark if there is one."""
    rest, number = b"", 0
    with naming(name):
        stream = open_text(file, name)
        while block := stream.read(BLOCK_BYTES):
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                number += 1
                yield number, _text_of(line + b"\n", name, number)
            if len(rest) > _LONGEST_LINE:
                raise DataError(f"{name}:{number + 1}: a line of more than {_LONGEST_LINE >> 20} MiB", hint="is it a text file?")
        if rest:
            yield number + 1, _text_of(rest, name, number + 1)


def without_blank_end(
    lines: Iterable[tuple[int, str]], left_out: Callable[[int, int], None] = lambda first, last: None
) -> Iterator[tuple[int, str]]:
    """The lines without empty ones at the end; of each group of empty lines elsewhere, which callers refuse, only the first.

    Args:
        left_out: called with the first and the last number of the empty lines at the end.
    """
    begins: tuple[int, str] | None = None
    number = 0
    for number, text in lines:
        if not text.strip():
            begins = begins or (number, text)
            continue
        if begins is not None:
            yield begins
            begins = None
        yield number, text
    if begins is not None:
        left_out(begins[0], number)


def raw_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file unchanged, with line ends, and with a byte order mark if there is one.

    Raises:
        DataError: the file is missing, damaged or not UTF-8.
    """
    with naming(str(path)), path.open("rb") as file:
        yield from (line for _, line in _whole_lines(file, str(path)))


def whole_text(path: Path) -> str:
    """The content of a UTF-8 file, with unchanged line ends.

    Raises:
        DataError: the file is missing, damaged or not UTF-8.
    """
    with naming(str(path)), path.open("rb") as file:
        data = open_text(file, str(path)).read()
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as problem:
        raise _not_utf8(str(path), data.count(b"\n", 0, problem.start) + 1, problem) from problem


def json_file(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        DataError: the file is missing, damaged, not UTF-8 or not JSON.
    """
    return parsed_json(whole_text(path), f"{path}")


def parsed_json(text: str, where: str) -> Any:
    """A JSON value. NaN and infinities are accepted: callers that need finite numbers check them with a better message.

    Raises:
        DataError: the text is not JSON.
    """
    try:
        return json_value(text)
    except json.JSONDecodeError as problem:
        place = f", line {problem.lineno}" if problem.lineno > 1 else ""
        raise DataError(
            f"{where}{place}: not JSON: {problem.msg} at column {problem.colno}",
            hint="JSON lines have one object per line; python -m json.tool FILE shows what is wrong with a JSON file",
        ) from problem


def clean_text(text: str) -> str:
    """The text with lone surrogates (valid in JSON, but not in UTF-8) replaced by U+FFFD, one for one."""
    if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    return "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)


def split_file(folder: Path, names: tuple[str, ...], what: str) -> Path:
    """The first of some file names that exists in a folder.

    Raises:
        ConfigError: the folder does not exist.
        DataError: none of them exists; the message lists the files in the folder.
    """
    found = optional_split_file(folder, names)
    if found is not None:
        return found
    held = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    listed = ", ".join(held[:20]) + (", ..." if len(held) > 20 else "") or "nothing"
    raise DataError(
        f"{folder} has no {what} file: expected {' or '.join(names)}, found {listed}", hint=f"put {names[0]} into the folder"
    )


def optional_split_file(folder: Path, names: tuple[str, ...]) -> Path | None:
    """The first of some file names that exists in a folder, or None.

    Raises:
        ConfigError: the folder does not exist.
    """
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        parent = folder.parent if folder.parent.is_dir() else None
        near = did_you_mean(folder.name, [path.name for path in parent.iterdir() if path.is_dir()]) if parent else None
        raise ConfigError(f"{folder} {kind}; expected a folder with {names[0]}", hint=near)
    return next((folder / name for name in names if (folder / name).is_file()), None)


def existing_splits(folder: Path, names: Mapping[str, tuple[str, ...]]) -> dict[str, Path]:
    """The file of each split that exists in a folder.

    Args:
        names: possible file names of each split; the first that exists is used.

    Raises:
        ConfigError: the folder does not exist.
    """
    found = {split: optional_split_file(folder, candidates) for split, candidates in names.items()}
    return {split: path for split, path in found.items() if path is not None}


def _text_of(line: bytes, name: str, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise _not_utf8(name, number, problem) from problem


def _not_utf8(name: str, number: int, problem: UnicodeDecodeError) -> DataError:
    wrong = problem.object[problem.start]
    encoding = likely_encoding(problem.object)
    may_be = f"it may be {encoding}, so " if encoding else ""
    return DataError(
        f"{name}:{number}: not UTF-8: byte 0x{wrong:02x}",
        hint=f"{may_be}save it as UTF-8: iconv -f {encoding or 'ENCODING'} -t UTF-8 {Path(name).name} > new-{Path(name).name}",
    )
