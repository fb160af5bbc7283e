"""Writes what a data set says of itself, last of all its files."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer

import discern
from discern.artifacts.files import write_file
from discern.data.build import BuildOptions, Built, dtype_name
from discern.data.corpus import CorpusOptions
from discern.data.manifest import (
    MANIFEST_NAME,
    TOKENIZER_NAME,
    Manifest,
    Setting,
    TokenizerInfo,
    data_fingerprint,
)
from discern.data.problems import Problem
from discern.data.tokenizer_choice import TokenizerChoice


def configuration(
    choice: TokenizerChoice,
    corpus: CorpusOptions,
    build: BuildOptions,
    language: str | None = None,
    license: str | None = None,
) -> dict[str, Setting]:
    """Every setting that decides what is written, not the number of workers; and what the user said of the text."""
    said = {"language": language, "license": license}
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
) -> Manifest:
    """Write `tokenizer.json` and `manifest.json` into the folder of the shards; gives the manifest."""
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
        versions={"discern": discern.__version__, "tokenizers": version("tokenizers")},
    )
    text = json.dumps(manifest.model_dump(mode="json"), indent=2, ensure_ascii=False)
    # A byte of a file name that is not UTF-8 becomes an escape of JSON's.
    write_file(folder / MANIFEST_NAME, text.encode(errors="backslashreplace") + b"\n")
    return manifest
