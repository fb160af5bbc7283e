"""The manifest of a data set: its configuration, statistics and checksums.

It contains no time, no machine and no number of workers, so that the same input, options and library versions give the same
manifest, byte for byte.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import Field

from discern.config.schema import Section
from discern.data.curation.contamination import FileOverlap
from discern.data.sources.documents import Problem
from discern.errors import DataError
from discern.parsing import json_value
from discern.storage.checksums import has_file, known_checksums, read_json, understood

FORMAT = "discern-data"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
COUNTS_NAME = "token-counts.int64"
ADDED_NAME = "added-tokens.json"  # in a data set whose tokenizer was extended by `discern adapt --add-tokens`

Setting = str | int | float | bool | None | tuple[str, ...]
SplitName = Literal["train", "heldout"]
SPLITS: tuple[SplitName, ...] = ("train", "heldout")


class FileInfo(Section):
    """Size in bytes and checksum of a file of the data set."""

    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class ShardInfo(Section):
    """A shard. `files` maps a suffix (tokens, documents, sentences, words) to the file."""

    name: str = Field(pattern=r"^[\w-]+$")
    num_tokens: int = Field(ge=0)
    num_documents: int = Field(ge=0)
    num_sentences: int = Field(ge=0)
    files: dict[str, FileInfo]


class SplitInfo(Section):
    """The shards of a split, and their total counts."""

    num_tokens: int
    num_documents: int
    num_sentences: int
    shards: tuple[ShardInfo, ...]


class TokenizerInfo(Section):
    """The tokenizer of the data set. `fingerprint` covers what decides the ids, not the decoder."""

    fingerprint: str
    kind: str
    vocab_size: int
    special_tokens: dict[str, int]
    lowercase: bool
    strips_accents: bool = Field(description="Whether lower-casing also removes accents, as in BERT.")


class Statistics(Section):
    """Counts over both splits."""

    documents: int
    sentences: int
    tokens: int
    words: int
    unknown_tokens: int
    unknown_fraction: float
    unknown_causes: dict[str, int] = Field({}, exclude=True, description="Unknown tokens by cause, of some; not written.")
    tokens_per_word: float
    duplicates: int = Field(description="Documents with exactly the text of an earlier one.")
    empty_documents: int = Field(description="Documents left out because they have no tokens.")
    characters: int
    bytes_read: int = Field(description="Bytes of the input as stored, possibly compressed.")
    document_lengths: dict[str, int] = Field(description="In tokens, by quantile.")


class NearDuplicates(Section):
    """The near-duplicates that were removed, and how they were found."""

    similarity: float = Field(description="Least share of equal minima in the signatures of two documents.")
    bands: int
    rows: int = Field(description="Minima in a band.")
    clusters: int
    removed: int
    cluster_sizes: dict[str, int] = Field(description="Number of clusters by number of documents.")


class Manifest(Section):
    """The manifest of a data set: configuration, versions, statistics and checksums."""

    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    fingerprint: str
    dtype: Literal["uint16", "uint32"]
    tokenizer: TokenizerInfo
    splits: dict[SplitName, SplitInfo]
    token_counts: FileInfo
    statistics: Statistics
    problems: tuple[Problem, ...]
    inputs: tuple[str, ...]
    configuration: dict[str, Setting]
    versions: dict[str, str]
    overlap: tuple[FileOverlap, ...] | None = Field(None, description="Overlap with evaluation files; None: not checked.")
    near_duplicates: NearDuplicates | None = Field(None, description="Near-duplicates removed; None: not looked for.")
    filtered: dict[str, int] | None = Field(None, description="Documents left out by filter and reason; None: no filters.")

    @property
    def files(self) -> dict[str, FileInfo]:
        """The files of the data set whose checksums are here, by name."""
        shards = [shard for split in self.splits.values() for shard in split.shards]
        return {COUNTS_NAME: self.token_counts} | {
            f"{shard.name}.{suffix}": file for shard in shards for suffix, file in shard.files.items()
        }


def data_fingerprint(tokenizer_fingerprint: str, splits: dict[SplitName, SplitInfo]) -> str:
    """SHA-256 of the fingerprint of the tokenizer and the checksums of all shards, in order."""
    total = hashlib.sha256(tokenizer_fingerprint.encode())
    for split in SPLITS:
        for shard in splits[split].shards:
            for suffix in sorted(shard.files):
                total.update(f"{shard.name}.{suffix}:{shard.files[suffix].sha256}\n".encode())
    return total.hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a data set.

    Raises:
        DataError: the folder has no manifest, or one that is damaged or of another format or version.
    """
    path = folder / MANIFEST_NAME
    none = (
        "make one with: discern prepare TEXT --out DATA --train-tokenizer wordpiece --vocab-size 8000; "
        "for an existing model, use its tokenizer: --tokenizer MODEL"
    )
    if not has_file(folder, MANIFEST_NAME):
        other = "it is a file" if folder.exists() else "there is no such folder"
        reason = f"{path.name} is missing" if folder.is_dir() else other
        raise DataError(f"{folder} is not a data set: {reason}", hint=none)
    hint = "copy the file back, or run the same `discern prepare` again with --overwrite"
    raw = read_json(path, hint=hint)
    if (raw.get("format"), raw.get("format_version")) != (FORMAT, FORMAT_VERSION):
        raise DataError(f"{path} is not the manifest of a data set of this version of discern", hint=none)
    with understood(path, hint=hint):
        return Manifest.model_validate(raw)


def is_data_set(folder: Path) -> bool:
    """Whether a folder holds a data set of any version, whose manifest may be damaged or lost."""
    if MANIFEST_NAME in known_checksums(folder):
        return True
    try:
        raw = json_value((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and raw.get("format") == FORMAT
