"""Publishes a data set: checks the output folder, writes the manifest, and repairs damaged files."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import Tokenizer

from discern.data.dataset.manifest import (
    ADDED_NAME,
    COUNTS_NAME,
    MANIFEST_NAME,
    TOKENIZER_NAME,
    Manifest,
    Setting,
    is_data_set,
    read_manifest,
)
from discern.errors import ConfigError
from discern.storage.checksums import CHECKSUMS_NAME, checksum, recording, write_recorded
from discern.storage.files import OutputFolder, StagedFolder, listed

_SHARD = re.compile(r"(train|heldout)-\d{5,}\.(tokens|documents|sentences|words)")


def existing_data_set(out: Path, configuration: dict[str, Setting], overwrite: bool) -> Manifest | None:
    """The manifest of an existing data set in `out` with the same settings; None if `out` is free or will be replaced.

    The other files are not checked; see `repair`.

    Raises:
        ConfigError: `out` is not a data set, or is a data set made with other settings and `overwrite` is not given, or is to be
            replaced and contains files that do not belong to the data set.
    """
    if OutputFolder(out).is_free:
        return None
    if not out.is_dir() or not is_data_set(out):
        raise ConfigError(
            f"{out} exists and is {'not a data set' if out.is_dir() else 'a file'}; it was not changed",
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
        raise other_data_set(out, f"made with different settings ({changes})")
    return manifest


def refuse_foreign(out: Path) -> None:
    """Check that the folder of a data set that is to be replaced contains nothing else.

    Raises:
        ConfigError: there are other files, which would be lost.
    """
    names = sorted(path.name for path in out.iterdir() if not is_own_name(path.name))
    if names:
        raise ConfigError(
            f"{out} also contains {listed(names)}, which --overwrite would delete",
            hint=f"move {'it' if len(names) == 1 else 'them'} away, or give another --out",
        )


def is_own_name(name: str) -> bool:
    """Whether a file of this name belongs to a data set."""
    return name in (MANIFEST_NAME, TOKENIZER_NAME, COUNTS_NAME, ADDED_NAME, CHECKSUMS_NAME) or _SHARD.fullmatch(name) is not None


def other_data_set(out: Path, what: str) -> ConfigError:
    """The error of an output folder with another data set."""
    return ConfigError(f"{out} holds a data set {what}", hint="add --overwrite to replace it, or give another --out")


def write_header(folder: Path, tokenizer: Tokenizer, manifest: Manifest) -> None:
    """Write `tokenizer.json`, `manifest.json` and their checksums to the folder of the shards."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
    write_recorded(folder, {TOKENIZER_NAME: tokenizer.to_str(pretty=True), MANIFEST_NAME: text})


def repair(folder: StagedFolder, made: Manifest) -> tuple[str, ...]:
    """Replace files of the existing data set that differ from those of the same data set, made again.

    Args:
        folder: staged folder with the data set made again.

    Returns:
        Names of the files that were damaged or missing. A manifest that only records something new is not one of them.
    """
    replaced = [
        name
        for name in (*made.files, TOKENIZER_NAME, MANIFEST_NAME)
        if not (folder.target / name).is_file() or checksum(folder.path / name) != checksum(folder.target / name)
    ]
    header = {name: checksum(folder.path / name) for name in replaced if name in (TOKENIZER_NAME, MANIFEST_NAME)}
    with recording(folder.target, header):
        folder.replace_files(replaced)
    return tuple(name for name in replaced if name != MANIFEST_NAME)
