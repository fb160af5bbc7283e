"""The first stage: the text of a piece becomes tokens in a file, with a digest and the length of each document."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int

from discern.data.curation.filters import Rules
from discern.data.curation.near_duplicates import HASHES, Banding, Signer
from discern.data.dataset.build import chunks_of
from discern.data.dataset.manifest import ShardInfo
from discern.data.dataset.shards import Shard
from discern.data.dataset.writing import ShardFiles
from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import ProblemLog
from discern.data.stages.plan import PrepareJob, check_unchanged
from discern.data.stages.results import Aside, result_of, values_of
from discern.data.stages.signatures import read_signatures, with_checks, write_bands
from discern.data.tokenizer import vocab_size
from discern.data.tokenizer.encoding import DIGEST_BYTES, DocumentEncoder, TokenBlock, token_dtype
from discern.data.tokenizer.words import SegmenterName
from discern.storage.files import sync_file

_BLOCK = "block"
_COLUMNS = ("digests", "characters", "signatures")
_WIDEST_GAP = 64
_WINDOW_TOKENS = 1 << 22


def make_piece(job: PrepareJob, index: int, aside: Aside) -> None:
    """Read the inputs of a piece, tokenize them, and write the tokens.

    Raises:
        DataError: an input cannot be read or has changed since the plan was made, or the result cannot be written.
        ConfigError: the records have no such field, or an optional package is missing.
    """
    plan = job.plan
    encoder = _encoder(job.tokenizer.to_str(), plan.build.segmenter)
    text, problems = Corpus.of(plan.pieces[index], plan.corpus), ProblemLog()
    bytes_read = characters = empty = 0
    rules, unknown, filtered = Rules(plan.build.filters), Counter[str](), Counter[str]()

    def count(size: int) -> None:
        nonlocal bytes_read
        bytes_read += size

    signer = _signer() if plan.build.near_duplicates is not None else None
    block = ShardFiles(aside.path, _BLOCK)
    with ExitStack() as stack:
        stack.callback(block.abandon)
        columns = {name: stack.enter_context((aside.path / name).open("xb")) for name in _COLUMNS[: 3 if signer else 2]}
        for read in chunks_of(text.documents(problems, count)):
            documents, left_out = rules.apply(read)
            filtered += left_out
            chunk = encoder.encode(documents)
            block.append(chunk.block)
            columns["digests"].write(chunk.block.digests.tobytes())
            counts = np.array([sum(map(len, document)) for document in documents], dtype="<i8")
            columns["characters"].write(counts[chunk.kept].tobytes())
            if signer is not None:
                columns["signatures"].write(with_checks(signer.sign(documents)[chunk.kept]).tobytes())
            characters += chunk.characters
            empty += int((~chunk.kept).sum())
            unknown += chunk.unknown
        check_unchanged(job.folder, plan.pieces[index])
        for column in columns.values():
            sync_file(column)
        info = block.close()
    if plan.build.near_duplicates is not None:
        signatures = read_signatures(aside.path, info.num_documents)[:, :HASHES]
        write_bands(aside.path, signatures, Banding.of(plan.build.near_duplicates))
    aside.values = {
        "block": info.model_dump(mode="json"),
        "characters": characters,
        "empty": empty,
        "bytes_read": bytes_read,
        "unknown": unknown,
        "filtered": filtered,
        "problems": [problem.model_dump(mode="json") for problem in problems.summary()],
        "notes": list(problems.notes),
    }


class Pieces:
    """The documents of all pieces, numbered in the order of the input.

    Attributes:
        folders: the result of each piece.
        values: what the task of each piece found.
        firsts: the number of the first document of each piece, and of all documents.
    """

    def __init__(self, job: PrepareJob) -> None:
        self._dtype = token_dtype(vocab_size(job.tokenizer)).newbyteorder("<")
        self.folders = [result_of(job.folder, "pieces", index) for index in range(len(job.plan.pieces))]
        self.values: list[dict[str, Any]] = [values_of(folder) for folder in self.folders]
        counts = [found["block"]["num_documents"] for found in self.values]
        self.firsts: Int[np.ndarray, " bounds"] = np.cumsum([0, *counts])
        self._open: tuple[int, Shard] | None = None

    @property
    def num_documents(self) -> int:
        """Number of documents with tokens."""
        return int(self.firsts[-1])

    def lengths(self, index: int) -> Int[np.ndarray, " D"]:
        """(D,) number of tokens of each document of a piece."""
        return np.diff(self._shard(index).document_starts)

    def blocks(self, documents: Int[np.ndarray, " n"]) -> Iterator[TokenBlock]:
        """The tokens of documents in the order given, without digests, in blocks of bounded size."""
        owners = np.searchsorted(self.firsts, documents, side="right") - 1
        gaps = np.diff(documents)
        breaks = np.nonzero((np.diff(owners) != 0) | (gaps <= 0) | (gaps > _WIDEST_GAP))[0] + 1
        for run in np.split(np.arange(len(documents)), breaks):
            if len(run):
                owner = int(owners[run[0]])
                yield from self._windows(self._shard(owner), documents[run] - self.firsts[owner])

    def _windows(self, shard: Shard, chosen: Int[np.ndarray, " n"]) -> Iterator[TokenBlock]:
        """Documents of a piece, ascending, close to each other."""
        starts = shard.document_starts
        first = 0
        while first < len(chosen):
            limit = int(starts[chosen[first]]) + _WINDOW_TOKENS
            stop = max(first + 1, int(np.searchsorted(starts[chosen + 1], limit, side="right")))
            low, high = int(chosen[first]), int(chosen[stop - 1]) + 1
            bounds = np.asarray(starts[low : high + 1])
            places = np.searchsorted(shard.sentence_starts, bounds)
            mask = np.zeros(high - low, dtype=bool)
            mask[chosen[first:stop] - low] = True
            yield TokenBlock(
                tokens=np.asarray(shard.tokens[bounds[0] : bounds[-1]]),
                word_starts=shard.word_starts(int(bounds[0]), int(bounds[-1])),
                sentence_lengths=np.diff(shard.sentence_starts[places[0] : places[-1] + 1]),
                document_sentences=np.diff(places),
                digests=np.zeros((high - low, DIGEST_BYTES), dtype=np.uint8),
            ).select(mask)
            first = stop

    def _shard(self, index: int) -> Shard:
        if self._open is None or self._open[0] != index:
            info = ShardInfo.model_validate(self.values[index]["block"])
            self._open = index, Shard(self.folders[index], info, self._dtype, 0)
        return self._open[1]


@lru_cache(maxsize=1)
def _signer() -> Signer:
    """The signer of this process, which remembers the words that it has seen."""
    return Signer()


@lru_cache(maxsize=1)
def _encoder(tokenizer_json: str, segmenter: SegmenterName) -> DocumentEncoder:
    """The encoder of this process, which remembers the words that it has seen."""
    return DocumentEncoder(tokenizer_json, segmenter)
