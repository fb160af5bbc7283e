"""Publishes a data set: checks the output folder, writes the manifest, and repairs damaged files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer

import discern
from discern.data.curation.contamination import FileOverlap
from discern.data.curation.filters import versions_of
from discern.data.dataset.build import BuildOptions, Built, dtype_name
from discern.data.dataset.manifest import (
    ADDED_NAME,
    COUNTS_NAME,
    MANIFEST_NAME,
    TOKENIZER_NAME,
    FileInfo,
    Manifest,
    Setting,
    TokenizerInfo,
    data_fingerprint,
    is_data_set,
    read_manifest,
)
from discern.data.sources.documents import CorpusOptions, Problem
from discern.data.tokenizer import fingerprint, lowercases, special_ids, vocab_size
from discern.data.tokenizer.choice import TokenizerChoice, TrainedTokenizer
from discern.errors import ConfigError
from discern.storage.checksums import CHECKSUMS_NAME, checksum, read_checksums, record_checksums, recording
from discern.storage.files import write_file
from discern.storage.output import OutputFolder, StagedFolder, listed

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
    names = OutputFolder(out).foreign(is_own_name)
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


def repair(folder: StagedFolder, before: Manifest, made: Manifest) -> tuple[str, ...]:
    """Compare every file of the existing data set with its checksum, and replace damaged or missing files.

    Args:
        folder: staged folder with the same data set, made again.
        before: manifest of the existing data set.
        made: manifest of the new one.

    Returns:
        Names of the files that were damaged or missing.
    """
    names = [name for name, expected in files_of(made).items() if not _is_sound(folder.target / name, expected)]
    # Compared with its own checksum: the serialization of a tokenizer depends on the version of the library.
    tokenizer = folder.target / TOKENIZER_NAME
    if not tokenizer.is_file() or checksum(tokenizer) != read_checksums(folder.target).get(TOKENIZER_NAME):
        names.append(TOKENIZER_NAME)
    if (before.splits, before.token_counts, before.tokenizer, before.dtype) != (
        made.splits,
        made.token_counts,
        made.tokenizer,
        made.dtype,
    ):
        names.append(MANIFEST_NAME)
    # An overlap that was not checked before is recorded; nothing was damaged.
    recorded = [MANIFEST_NAME] if before.overlap != made.overlap and MANIFEST_NAME not in names else []
    listed = {name: checksum(folder.path / name) for name in (TOKENIZER_NAME, MANIFEST_NAME) if name in (*names, *recorded)}
    with recording(folder.target, listed):
        folder.replace_files([*names, *recorded])
    return tuple(names)


def files_of(manifest: Manifest) -> dict[str, FileInfo]:
    """The files of a data set with checksums, by name."""
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


def configuration(
    choice: TokenizerChoice,
    corpus: CorpusOptions,
    build: BuildOptions,
    language: str | None = None,
    license: str | None = None,
) -> dict[str, Setting]:
    """Every setting that affects the output, and the language and license of the text."""
    said = {"language": language, "license": license, "near_duplicates": build.near_duplicates}
    said["filters"] = ",".join(build.filters) or None
    return {
        "train_tokenizer": choice.train,
        "vocab_size": choice.size if choice.train else None,
        "lowercase": choice.lowercase,
        "documents": corpus.documents,
        "text_field": corpus.record_field,
        "segmenter": build.segmenter,
        "heldout": build.heldout,
        "seed": build.seed,
        "shard_tokens": build.shard_tokens,
    } | {name: value for name, value in said.items() if value is not None}


def write_header(
    folder: Path,
    tokenizer: Tokenizer,
    info: TokenizerInfo,
    built: Built,
    inputs: tuple[str, ...],
    settings: dict[str, Setting],
    problems: tuple[Problem, ...],
    overlap: tuple[FileOverlap, ...] | None = None,
) -> Manifest:
    """Write `tokenizer.json`, `manifest.json` and their checksums to the folder of the shards; returns the manifest."""
    write_file(folder / TOKENIZER_NAME, tokenizer.to_str(pretty=True).encode())
    manifest = Manifest(
        fingerprint=data_fingerprint(info.fingerprint, built.splits),
        dtype=dtype_name(tokenizer),
        tokenizer=info,
        splits=built.splits,
        token_counts=built.token_counts,
        statistics=built.statistics,
        problems=problems,
        inputs=inputs,
        configuration=settings,
        versions=library_versions(str(settings.get("filters") or "").split(",")),
        overlap=overlap,
        near_duplicates=built.near_duplicates,
        filtered=built.filtered,
    )
    text = json.dumps(manifest.model_dump(mode="json"), indent=2, ensure_ascii=False)
    # A byte of a file name that is not UTF-8 becomes a JSON escape.
    write_file(folder / MANIFEST_NAME, text.encode(errors="backslashreplace") + b"\n")
    record_checksums(folder, (TOKENIZER_NAME, MANIFEST_NAME))
    return manifest


def library_versions(filters: Sequence[str]) -> dict[str, str]:
    """Versions of what the ids depend on."""
    return {"discern": discern.__version__, "tokenizers": version("tokenizers"), **versions_of(filters)}


def describe(tokenizer: Tokenizer, trained: TrainedTokenizer | None) -> TokenizerInfo:
    """The entry of the tokenizer in the manifest."""
    return TokenizerInfo(
        fingerprint=fingerprint(tokenizer),
        kind=type(tokenizer.model).__name__.lower(),
        vocab_size=vocab_size(tokenizer),
        special_tokens=special_ids(tokenizer),
        lowercase=lowercases(tokenizer),
        trained_on_sentences=trained.sentences if trained else None,
        trained_on_characters=trained.characters if trained else None,
    )
