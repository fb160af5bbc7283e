"""Checks of output paths: a command never replaces what it reads, and never writes into a model, run or data set that it reads.

Paths are compared by the files that they refer to (device and inode), so `..`, links, bind mounts and letter case don't matter.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from discern.errors import ConfigError
from discern.storage.files import is_stream

_COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
_MARKS = (
    {"manifest.json", "tokenizer.json"},
    {"run.json"},
    {"finetuned.json"},
    {"comparison.json"},
    {"model.safetensors"},
    {"model.safetensors.index.json"},
    {"pytorch_model.bin"},
)
"""Files that identify a data set, a run, a fine-tuned model, a comparison or a model."""


_ESSENTIAL = frozenset().union(*_MARKS) | {"config.json", "config.toml", "metrics.jsonl", "results.json", "checksums.json"}
"""Files that such a folder requires. Results never overwrite one, in any folder."""


def check_output(option: str, out: Path | None, example: str, *reads: Path | None, own: Collection[str] = ()) -> None:
    """Check, before any work, that a file of results may be written to `out`.

    Args:
        option: the option for the file, such as "--out".
        out: the file; None is accepted.
        example: a file name to suggest.
        reads: files and folders that the command reads; those that do not exist are ignored.
        own: names of files that belong in a folder of `reads` and may be written there.

    Raises:
        ConfigError: `out` is a folder or a block device, is an input or in an input folder, is write-protected, or has the name
            of another kind of file.
    """
    if out is None:
        return
    if str(out) == "-":
        raise ConfigError(f"{option} - would create a file named '-'", hint=f"without {option} results go to standard output")
    if out.suffix in _COMPRESSED:
        raise ConfigError(f"{out} would contain plain text", hint=f"leave out {out.suffix}, and compress the file afterwards")
    if out.is_dir():
        raise ConfigError(f"{out} is a folder", hint=f"give a file: {option} {out / example}")
    elsewhere = f"write to another file: {option} {example}"
    try:
        if is_stream(out):
            return
    except OSError as problem:
        raise ConfigError(f"cannot write to {out}: {problem.strerror or problem}", hint=elsewhere) from None
    if out.exists() and not os.access(out, os.W_OK):
        raise ConfigError(f"{out} is write-protected", hint=f"chmod u+w {out}, or {elsewhere}")
    check_apart(option, out, *reads, own=own, hint=elsewhere)
    target = Path(os.path.realpath(out))
    if target.name in _ESSENTIAL and target.exists() and is_kept_whole(target.parent):
        raise ConfigError(f"{out} is part of the model, run or data set in {target.parent}", hint=elsewhere)


def check_apart(option: str, out: Path, *reads: Path | None, own: Collection[str] = (), hint: str | None = None) -> None:
    """Check that writing to `out` does not damage what the command reads.

    A new file or folder is allowed in an ordinary folder of the user, but not in a model, a run or a data set.

    Args:
        option: the option for the output, such as "--out".
        out: file or folder, which need not exist.
        reads: files and folders that the command reads; those that do not exist are ignored.
        own: names of files that belong in a folder of `reads` and may be written there.
        hint: hint of the error; None: suggest a path beside the input.

    Raises:
        ConfigError: `out` is an input, is inside a model, run or data set that is read, or contains an input.
    """
    if os.path.exists(out) and not (out.is_file() or out.is_dir()):  # a device or a pipe, whose content is not replaced
        return
    for read in existing(reads):
        instead = hint or _elsewhere(option, out, read)
        if os.path.exists(out) and out.samefile(read):
            what = "is read by the command, and cannot replace itself" if read.is_dir() else "is the input"
            raise ConfigError(f"{out} {what}", hint=instead)
        check_not_inside(option, out, read, own=own, hint=instead)
        if out.is_dir() and is_inside(read, out):
            raise ConfigError(f"{out} holds {read}, which the command reads", hint=instead)


def check_not_inside(option: str, out: Path, read: Path | None, *, own: Collection[str] = (), hint: str | None = None) -> None:
    """Check that `out` is not inside a model, run or data set that the command reads, and is not a hard link to one of its files.

    Raises:
        ConfigError: it is.
    """
    if read is None or not read.is_dir() or not is_kept_whole(read) or _is_own(out, read, own):
        return
    hint = hint or _elsewhere(option, out, read)
    if is_inside(out, read):
        raise ConfigError(f"{out} lies inside {read}, which the command reads", hint=hint)
    _refuse_linked(out, read, hint)


def existing(paths: Collection[Path | None]) -> Iterator[Path]:
    """The paths that exist; a name such as `-` does not."""
    for path in paths:
        if path is not None and os.path.exists(path):
            yield path


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path, which need not exist, is inside a folder, in any spelling of the two paths."""
    wanted = folder.stat()
    for parent in Path(os.path.realpath(path)).parents:
        try:
            if os.path.samestat(parent.stat(), wanted):
                return True
        except OSError:  # it does not exist yet, or is a file
            continue
    return False


def is_kept_whole(folder: Path) -> bool:
    """Whether a folder is a data set, a run, a fine-tuned model, a comparison or a model."""
    return any(all((folder / name).exists() for name in mark) for mark in _MARKS)


def _is_own(out: Path, folder: Path, own: Collection[str]) -> bool:
    """Whether a path is one of the files that commands write for the folder."""
    target = Path(os.path.realpath(out))
    return target.name in own and target.parent.is_dir() and target.parent.samefile(folder)


def _refuse_linked(out: Path, folder: Path, hint: str) -> None:
    """Raise an error if a file is a hard link to one in the folder."""
    if not out.is_file() or (status := out.stat()).st_nlink == 1:
        return
    for path in folder.rglob("*"):
        if path.exists() and os.path.samestat(path.stat(), status):
            raise ConfigError(f"{out} is the same file as {path}, which the command reads", hint=hint)


def _elsewhere(option: str, out: Path, read: Path) -> str:
    """A hint that suggests a path beside the input."""
    whole = Path(os.path.realpath(read))
    folder = whole.parent if read.name in ("", "..") else read.parent
    # The number comes before the suffix, which may decide the format.
    name = f"{whole.stem}-2{whole.suffix}" if out.name == read.name else f"{whole.name}-{out.name}"
    return f"choose another path: {option} {folder / name}"
