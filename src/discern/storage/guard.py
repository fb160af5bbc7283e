"""Checks of output paths: a command replaces nothing that it reads, and writes into no data set, run or model.

Paths are compared by the files that they refer to, so `..`, links and letter case don't matter.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from discern.errors import ConfigError
from discern.storage.files import is_stream

_COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
_MARKS = (
    {"manifest.json", "tokenizer.json"},
    {"plan.json", "tokenizer.json"},
    {"run.json"},
    {"finetuned.json"},
    {"comparison.json"},
    {"model.safetensors"},
    {"model.safetensors.index.json"},
    {"pytorch_model.bin"},
)
"""Files that identify a data set, one that is being prepared in parts, a run, a fine-tuned model, a comparison or a model."""


def check_output(option: str, out: Path | None, example: str, *reads: Path | None, own: Collection[str] = ()) -> None:
    """Check, before any work, that a file of results may be written to `out`.

    Args:
        option: the option for the file, such as "--out".
        out: the file; None is accepted.
        example: a file name to suggest.
        reads: files and folders that the command reads; those that do not exist are ignored.
        own: names of files that the command may write into the folder of a run or a model.

    Raises:
        ConfigError: `out` is a folder, is write-protected, or is refused by `check_apart`.
    """
    if out is None:
        return
    if str(out) == "-":
        raise ConfigError(f"{option} - would create a file named '-'", hint=f"without {option} results go to standard output")
    if out.suffix in _COMPRESSED:
        raise ConfigError(f"{out} would contain plain text", hint=f"leave out {out.suffix}, and compress the file afterwards")
    if os.path.isdir(out):
        raise ConfigError(f"{out} is a folder", hint=f"give a file: {option} {out / example}")
    elsewhere = f"write to another file: {option} {example}"
    check_apart(option, out, *reads, own=own, hint=elsewhere)
    if os.path.exists(out) and not os.access(out, os.W_OK):
        raise ConfigError(f"{out} is write-protected", hint=f"chmod u+w {out}, or {elsewhere}")


def check_apart(option: str, out: Path, *reads: Path | None, own: Collection[str] = (), hint: str | None = None) -> None:
    """Check that writing to `out` damages neither what the command reads, nor any data set, run or model.

    A new file or folder is allowed in an ordinary folder of the user, also beside a run or a data set.

    Args:
        option: the option for the output, such as "--out".
        out: file or folder, which need not exist.
        reads: files and folders that the command reads; those that do not exist are ignored.
        own: names of files that the command may write into the folder of a run or a model.
        hint: hint of the error; None: suggest a path beside the folder.

    Raises:
        ConfigError: `out` is an input or contains one, is inside a data set, run or model, or cannot be written to.
    """
    try:
        if not os.path.isdir(out) and is_stream(out):  # its content is not replaced
            return
    except OSError as problem:
        raise ConfigError(
            f"cannot write to {out}: {problem.strerror or problem}", hint=hint or f"choose another path for {option}"
        ) from None
    existing = [read for read in reads if read is not None and os.path.exists(read)]
    owned = {Path(os.path.realpath(read), name) for read in existing for name in own}
    # A link is checked on both sides: it may be a file of a data set that is stored elsewhere.
    place = Path(os.path.normpath(Path(os.path.realpath(out.parent), out.name)))
    for path in {place, Path(os.path.realpath(out))} - owned:
        for folder in filter(is_kept_whole, reversed(path.parents)):  # the outermost one, beside which there is room
            if folder / "work" in path.parents and (folder / "comparison.json").exists():
                continue  # a comparison trains its models there, and each has a folder of its own
            raise ConfigError(
                f"{out} lies inside {folder}, which is a data set, a run or a model", hint=hint or _elsewhere(option, out, folder)
            )
    for read in existing:
        instead = hint or _elsewhere(option, out, read)
        if os.path.exists(out) and out.samefile(read):
            what = "is read by the command, and cannot replace itself" if read.is_dir() else "is the input"
            raise ConfigError(f"{out} {what}", hint=instead)
        if out.is_dir() and any(out.samefile(parent) for parent in Path(os.path.realpath(read)).parents):
            raise ConfigError(f"{out} holds {read}, which the command reads", hint=instead)
        if out.is_file() and place not in owned and is_kept_whole(read):
            for path in read.rglob("*"):
                if os.path.exists(path) and out.samefile(path):
                    raise ConfigError(f"{out} is the same file as {path}, which the command reads", hint=instead)


def is_kept_whole(folder: Path) -> bool:
    """Whether a folder is a data set, a run, a fine-tuned model, a comparison or a model."""
    return any(all(os.path.exists(folder / name) for name in mark) for mark in _MARKS)


def _elsewhere(option: str, out: Path, read: Path) -> str:
    """A hint that suggests a path beside the input."""
    whole = Path(os.path.realpath(read))
    folder = whole.parent if read.name in ("", "..") else read.parent
    # The number comes before the suffix, which may decide the format.
    name = f"{whole.stem}-2{whole.suffix}" if out.name == read.name else f"{whole.name}-{out.name}"
    return f"choose another path: {option} {folder / name}"
