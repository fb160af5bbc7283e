"""The folder of a data set: whether it may be written, and how it appears whole or not at all."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from discern.artifacts.files import cannot_write
from discern.artifacts.folders import StagedFolder, staged
from discern.data.manifest import (
    ADDED_NAME,
    COUNTS_NAME,
    MANIFEST_NAME,
    TOKENIZER_NAME,
    FileInfo,
    Manifest,
    Setting,
    is_data_set,
    read_manifest,
)
from discern.errors import ConfigError

_SHARD = re.compile(r"(train|heldout)-\d{5,}\.(tokens|documents|sentences|words)")
_FEW = 4


def standing(out: Path, configuration: dict[str, Setting], overwrite: bool) -> Manifest | None:
    """The manifest of the data set that `out` holds already and that may be the one asked for; None if there is none.

    Its other files are not looked at: see `repair`.

    Raises:
        ConfigError: `out` is something else, or holds a data set made with other settings and `overwrite` is not given, or is to
            be replaced and holds files that are not the data set's.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not out.is_dir() or not is_data_set(out):
        raise ConfigError(
            f"{out} exists and is {'not a data set' if out.is_dir() else 'a file'}; it is left as it is",
            hint="give another --out",
        )
    if overwrite:
        refuse_foreign(out)
        return None
    manifest = read_manifest(out)
    before = manifest.configuration
    differing = sorted(key for key in before.keys() | configuration.keys() if before.get(key) != configuration.get(key))
    if differing:
        changes = ", ".join(f"{key}: {before.get(key)} -> {configuration.get(key)}" for key in differing)
        raise another(out, f"made with other settings ({changes})")
    return manifest


def refuse_foreign(out: Path) -> None:
    """Raise where a data set that is to be replaced shares its folder with files and folders of the user's.

    Raises:
        ConfigError: it does; they would be lost.
    """
    own = {MANIFEST_NAME, TOKENIZER_NAME, COUNTS_NAME, ADDED_NAME}
    names = sorted(path.name for path in out.iterdir() if path.name not in own and not _SHARD.fullmatch(path.name))
    if names:
        listed = ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")
        raise ConfigError(
            f"{out} also holds {listed}, which --overwrite would delete",
            hint=f"move {'it' if len(names) == 1 else 'them'} away, or give another --out",
        )


def another(out: Path, what: str) -> ConfigError:
    """The refusal to replace a data set."""
    return ConfigError(f"{out} holds a data set {what}", hint="add --overwrite to replace it, or give another --out")


@contextmanager
def staging(out: Path) -> Iterator[StagedFolder]:
    """A hidden folder beside `out` to write into; gone when the block ends, whatever happens.

    What an earlier run left when it was killed is removed as well.

    Raises:
        DataError: another process prepares the same data set, or the folder cannot be made or written.
    """
    try:
        with staged(out) as folder:
            yield folder
    except OSError as problem:
        raise cannot_write(out, problem) from problem


def repair(folder: StagedFolder, before: Manifest, made: Manifest) -> tuple[str, ...]:
    """Compare every file of the data set in place with its checksum, and put the new one where it differs.

    Args:
        folder: holds the same data set, made anew.
        before, made: manifests of the one in place and of the new one.

    Returns:
        Names of the files that were damaged or missing.
    """
    names = [name for name, expected in files_of(made).items() if not _is_sound(folder.target / name, expected)]
    # How a tokenizer is written down differs between versions of the library.
    if before.versions.get("tokenizers") == made.versions.get("tokenizers") or not (folder.target / TOKENIZER_NAME).is_file():
        names += [TOKENIZER_NAME] if not _are_equal(folder.target / TOKENIZER_NAME, folder.path / TOKENIZER_NAME) else []
    if (before.splits, before.token_counts, before.tokenizer, before.dtype) != (
        made.splits,
        made.token_counts,
        made.tokenizer,
        made.dtype,
    ):
        names.append(MANIFEST_NAME)
    folder.replace_files(names)
    return tuple(names)


def files_of(manifest: Manifest) -> dict[str, FileInfo]:
    """The files with checksums, by name."""
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    return {
        COUNTS_NAME: manifest.token_counts,
        **{f"{shard.name}.{suffix}": info for shard in shards for suffix, info in shard.files.items()},
    }


def _is_sound(path: Path, expected: FileInfo) -> bool:
    if not path.is_file() or path.stat().st_size != expected.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == expected.sha256


def _are_equal(one: Path, other: Path) -> bool:
    return one.is_file() and one.read_bytes() == other.read_bytes()
