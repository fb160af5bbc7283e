"""What a data set says of itself: `manifest.json`. It holds no time, no machine and no worker count.

So the same input, options and library versions give the same manifest, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from discern.config.base import Section
from discern.data.problems import Problem
from discern.errors import DataError

FORMAT = "discern-data"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
TOKENIZER_NAME = "tokenizer.json"
COUNTS_NAME = "token-counts.int64"
ADDED_NAME = "added-tokens.json"  # beside a data set whose tokenizer `discern adapt --add-tokens` extended

Setting = str | int | float | bool | None
SplitName = Literal["train", "heldout"]
SPLITS: tuple[SplitName, ...] = ("train", "heldout")


class FileInfo(Section):
    """A file of the data set: its size in bytes and the hash of its content."""

    size: int
    sha256: str


class ShardInfo(Section):
    """One shard: `files` maps the suffix (tokens, documents, sentences, words) to the file."""

    name: str
    num_tokens: int
    num_documents: int
    num_sentences: int
    files: dict[str, FileInfo]


class SplitInfo(Section):
    """The shards of `train` or `heldout`, and their sums."""

    num_tokens: int
    num_documents: int
    num_sentences: int
    shards: tuple[ShardInfo, ...]


class TokenizerInfo(Section):
    """Which tokenizer made the ids. `fingerprint` covers what decides them, not what decodes them."""

    fingerprint: str
    kind: str
    vocab_size: int
    special_tokens: dict[str, int]
    lowercase: bool
    trained_on_characters: int | None = Field(None, description="Size of the training sample; None if it was given.")
    trained_on_sentences: int | None = None


class Statistics(Section):
    """Counts over both splits. Quantiles map a level ("0.5") to a length in tokens, exact below 4096, else within 1 %."""

    documents: int
    sentences: int
    tokens: int
    words: int
    unknown_tokens: int
    unknown_fraction: float
    tokens_per_word: float
    duplicates: int = Field(description="Documents whose text is exactly that of an earlier one.")
    empty_documents: int = Field(description="Documents left out because no token remained of them.")
    characters: int
    bytes_read: int = Field(description="Bytes of the input as it is stored, compressed or not.")
    document_lengths: dict[str, int]
    sentence_lengths: dict[str, int]


class Manifest(Section):
    """The header of a data set: what made it, what it holds, and the checksums."""

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


def data_fingerprint(tokenizer_fingerprint: str, splits: dict[SplitName, SplitInfo]) -> str:
    """sha256 over the tokenizer's fingerprint and every shard's checksums, in order."""
    total = hashlib.sha256(tokenizer_fingerprint.encode())
    for split in SPLITS:
        for shard in splits[split].shards:
            for suffix in sorted(shard.files):
                total.update(f"{shard.name}.{suffix}:{shard.files[suffix].sha256}\n".encode())
    return total.hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a data set.

    Raises:
        DataError: the folder holds none, or one of another format or version.
    """
    path = folder / MANIFEST_NAME
    hint = (
        "make one with: discern prepare TEXT --out DATA --train-tokenizer wordpiece --vocab-size 8000; "
        "for a model that there is, with its tokenizer: --tokenizer MODEL"
    )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise DataError(f"{folder} is not a data set: {path.name} {_reason(problem)}", hint=hint) from problem
    except ValueError as problem:
        raise DataError(f"{path} is not valid JSON: {problem}", hint=hint) from problem
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise DataError(f"{path} is not the manifest of a discern data set", hint=hint)
    if raw.get("format_version") != FORMAT_VERSION:
        found = raw.get("format_version")
        raise DataError(
            f"{folder}: data format version {found}, but this discern reads version {FORMAT_VERSION}",
            hint="prepare the data again with this version of discern",
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as problem:
        raise DataError(f"{path} is damaged: {problem.error_count()} fields are wrong\n{problem}", hint=hint) from problem


def is_data_set(folder: Path) -> bool:
    """Whether a folder says that it is a discern data set, of whatever version and however damaged."""
    try:
        raw = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and raw.get("format") == FORMAT


def _reason(problem: OSError) -> str:
    return "is missing" if isinstance(problem, FileNotFoundError) else f"cannot be read ({problem.strerror})"
