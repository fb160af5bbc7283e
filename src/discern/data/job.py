"""The work of `prepare`: its inputs in pieces, and what is made of each piece, by any process on any machine.

Everything is a file of one folder beside the data set: what is to be made (`job.json`), the tokenizer, and for each piece its
parts, which appear whole, and a record of the piece when it is done. So whoever continues an interrupted work finds what is done,
and two machines that do the same piece do no harm. The name of the folder has a digest of the inputs, the settings and the
versions: work on other text or with other settings is never continued.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial
from glob import escape
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Int, UInt
from pydantic import TypeAdapter

import discern
from discern.data.curation import near_duplicates
from discern.data.curation.contamination import ContaminationSearch, EvaluationFiles
from discern.data.curation.filters import Rules, versions_of
from discern.data.curation.near_duplicates import HASHES, sign
from discern.data.dataset.manifest import TOKENIZER_NAME
from discern.data.languages import SegmenterName
from discern.data.sources.corpus import Corpus, Input
from discern.data.sources.documents import CorpusOptions, Document, ProblemLog
from discern.data.tokenizer.encoding import DocumentEncoder, TokenBlock
from discern.data.tokenizer.words import check_segmenter
from discern.errors import ConfigError, DataError, DiscernError
from discern.parsing import json_value
from discern.storage.files import replacing_file, write_bytes

CHUNK_CHARACTERS = 1 << 19
"""Number of characters that a worker gets at a time. It does not depend on the number of workers, nor does the output."""
PART_CHUNKS = 128
"""Number of chunks in a part, which is what an interruption loses."""
SMALLEST_PIECE, LARGEST_PIECE, _PIECES = 1 << 25, 1 << 28, 256
SHARD_TOKENS = 1 << 27
"""256 MiB of uint16."""
_JOB_NAME = "job.json"
_DIGIT, _DIGITS = "[0-9a-f]", 12  # of the digest in the name of a folder
_SHARED = "give an --out on storage that every machine mounts at the same path"


@dataclass(frozen=True)
class PrepareOptions:
    """How documents become shards.

    Attributes:
        segmenter: source of word boundaries.
        heldout: expected fraction of held-out documents.
        seed: seed of the choice of held-out documents.
        shard_tokens: maximum number of tokens per shard, unless a single document is longer.
        workers: number of processes that tokenize; the output does not depend on it.
        filters: names of filters, which leave out documents before they are tokenized.
        near_duplicates: similarity from which documents are near-duplicates, of which the first is kept; None keeps all.
        language: code of the language of the text, for model cards.
        license: license of the text, for model cards.
    """

    segmenter: SegmenterName = "none"
    heldout: float = 0.01
    seed: int = 0
    shard_tokens: int = SHARD_TOKENS
    workers: int = 1
    near_duplicates: float | None = None
    filters: tuple[str, ...] = ()
    language: str | None = None
    license: str | None = None

    def check(self) -> None:
        """Check the options before any work.

        Raises:
            ConfigError: there is no such filter, or the segmenter is not installed.
        """
        Rules(self.filters)  # refuses what is no filter
        check_segmenter(self.segmenter)
        if self.license is not None and not (self.license.strip() and self.license.isprintable()):
            hint = "for example --license 'CC BY-SA 3.0'"
            raise ConfigError(f"the license is {self.license!r:.80}, expected its name in one line", hint=hint)


@dataclass(frozen=True)
class Job:
    """What is to be made of which files.

    Attributes:
        pieces: consecutive inputs that are read together.
        corpus: how the inputs become documents.
        options: how documents become shards.
        tokenizer: fingerprint of the tokenizer, or what is to be trained.
        against: evaluation files to look for.
        against_sha256: hash of the evaluation files.
        versions: versions of what the result depends on, which must be the same on every machine.
    """

    pieces: tuple[tuple[Input, ...], ...]
    corpus: CorpusOptions
    options: PrepareOptions
    tokenizer: str
    against: EvaluationFiles | None
    against_sha256: str
    versions: dict[str, str]

    @classmethod
    def of(cls, text: Corpus, options: PrepareOptions, tokenizer: str, against: EvaluationFiles | None) -> Job:
        """The job for a text. It depends on neither the engine nor the number of workers."""
        content = b"".join(path.read_bytes() for path in against.paths) if against else b""
        return cls(
            pieces=tuple(_pieces(text.inputs)),
            corpus=text.options,
            options=replace(options, workers=1),
            tokenizer=tokenizer,
            against=against,
            against_sha256=hashlib.sha256(content).hexdigest(),
            versions=library_versions(options.filters),
        )

    def folder_beside(self, target: Path) -> Path:
        """The folder of this work, beside the data set."""
        digest = hashlib.sha256(self._serialized()).hexdigest()
        return target.with_name(f".{target.name}.{digest[:_DIGITS]}.parts")

    def write(self, folder: Path) -> None:
        """Write the job to its folder."""
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / _JOB_NAME, self._serialized())

    def _serialized(self) -> bytes:
        # A byte of a file name that is not UTF-8 becomes an escape.
        return json.dumps(asdict(self), indent=1, default=str).encode()


def folders_beside(target: Path) -> list[Path]:
    """The folders of all work on a data set, also with other settings."""
    return list(target.parent.glob(f"{escape(f'.{target.name}.')}{_DIGIT * _DIGITS}.parts"))


def library_versions(filters: Iterable[str]) -> dict[str, str]:
    """Versions of what the ids depend on."""
    return {"discern": discern.__version__, "tokenizers": version("tokenizers"), **versions_of(filters)}


def _pieces(inputs: Iterable[Input]) -> Iterator[tuple[Input, ...]]:
    """Consecutive inputs of about the same number of bytes: small enough that many machines have work, large enough that starting
    one costs little. An input of unknown size is a piece of its own."""
    inputs = list(inputs)
    target = min(max(sum(item.size or 0 for item in inputs) // _PIECES, SMALLEST_PIECE), LARGEST_PIECE)
    piece: list[Input] = []
    size = 0
    for item in inputs:
        if piece and (item.size is None or size + item.size > target):
            yield tuple(piece)
            piece, size = [], 0
        # Names stay as the user gave them, because messages and the manifest have them. A task may run in another folder.
        piece.append(item if item.path is None else replace(item, path=Path(os.path.abspath(item.path))))
        size += target if item.size is None else item.size
    if piece:
        yield tuple(piece)


@dataclass(frozen=True)
class Chunk:
    """Consecutive whole documents.

    Attributes:
        documents: texts, or arrays of token ids; not both.
        origins: of each input that some are from, the index of the first, the name, and the number of that document in it.
    """

    documents: list[Document]
    origins: list[tuple[int, str, int]]

    def origin(self, index: int) -> tuple[str, int]:
        """The name of the input of a document, and the number of the document in it, from 1."""
        first, name, number = next(origin for origin in reversed(self.origins) if origin[0] <= index)
        return name, number + index - first


@dataclass(frozen=True)
class ChunkResult:
    """What a worker makes of a chunk.

    Attributes:
        block: the documents that have tokens.
        counts: what else is known, in JSON's types: the number of documents without tokens ("empty"), the number of unknown
            tokens by cause, in a sample ("unknown"), the number of documents that filters left out, by filter and reason
            ("filtered"), and the n-grams of evaluation files, as `ContaminationSearch.add` takes them ("matches").
        signatures: (D, 128) signatures of the documents of the block, if near-duplicates are looked for.
    """

    block: TokenBlock
    counts: dict[str, Any]
    signatures: UInt[np.ndarray, "D 128"] | None = None

    def save(self, file: BinaryIO) -> None:
        """Append the result, without signatures, to a file."""
        # By way of memory: where the disk is full, NumPy's errors do not say so.
        content = io.BytesIO()
        for array in (np.frombuffer(json.dumps(self.counts).encode(), dtype=np.uint8), *vars(self.block).values()):
            np.save(content, array)
        file.write(content.getbuffer())

    @classmethod
    def load(cls, file: BinaryIO) -> ChunkResult:
        """The next result in a file."""
        counts = json.loads(np.load(file).tobytes())
        return cls(TokenBlock(*(np.load(file) for _ in fields(TokenBlock))), counts)


@lru_cache(maxsize=1)
def job_of(work: str) -> Job:
    """The job of a folder, on the machine that works on it.

    Raises:
        DataError: this machine does not see the folder, or has other versions.
    """
    here = socket.gethostname()
    try:
        # Not by pydantic's own parser, which refuses the escape of a byte in a file name that is not UTF-8.
        job = TypeAdapter(Job).validate_python(json_value((Path(work) / _JOB_NAME).read_bytes()))
    except OSError as problem:
        raise DataError(f"{here} does not see {work}: {problem.strerror}", hint=_SHARED) from problem
    if job.versions != (found := library_versions(job.options.filters)):
        hint = "install the same versions on every machine"
        raise DataError(f"{here} has {found}, but the work was started with {job.versions}", hint=hint)
    return job


class _Worker:
    """What a process needs to work on chunks of a job. It remembers the words that it has seen."""

    def __init__(self, work: str) -> None:
        job = job_of(work)
        self.encoder = DocumentEncoder((Path(work) / TOKENIZER_NAME).read_text(), job.options.segmenter)
        self.rules = Rules(job.options.filters)
        self.signs = job.options.near_duplicates is not None
        self.search = ContaminationSearch(job.against) if job.against else None


_worker = lru_cache(maxsize=1)(_Worker)


def process_chunk(work: str, chunk: Chunk, *, signed: bool = False) -> ChunkResult:
    """Filter, tokenize, sign and search the documents of a chunk.

    Args:
        work: folder of the job, at the same path on every machine.
        signed: sign the documents although the job removes no near-duplicates; those of token ids are similar to none.

    Raises:
        DataError: this machine does not see the folder or has other versions, or a token id is not in the vocabulary.
        ConfigError: the input is token ids, but filters, near-duplicates or evaluation files need text.
    """
    worker, is_text = _worker(work), isinstance(chunk.documents[0], list)
    if not is_text and (job_of(work).options.filters or worker.signs or worker.search):
        raise ConfigError(
            f"{chunk.origins[0][1]} has token ids, but --filter, --near-duplicates and --against need text",
            hint="leave these options out, or give the text",
        )
    kept, filtered = worker.rules.apply(chunk.documents)
    found = worker.search.find(kept) if worker.search else {}
    matches = [(ngram, *chunk.origin(index), begins) for ngram, (index, begins) in found.items()]
    documents = [document for document in kept if document is not None]
    block, filled, unknown = worker.encoder.encode(documents)
    counts = {"empty": int((~filled).sum()), "unknown": unknown, "filtered": filtered, "matches": matches}
    texts = documents if is_text else [[]] * len(documents)
    return ChunkResult(block, counts, sign(texts)[filled] if signed or worker.signs else None)


ChunkMap = Callable[[Callable[[Chunk], ChunkResult], Iterable[Chunk]], Iterator[ChunkResult]]
"""Applies a function to chunks, in order: `map`, or that of an executor."""


def piece_results(
    work: str, index: int, map_chunks: ChunkMap = map, count: Callable[[int], None] = lambda _: None
) -> Iterator[ChunkResult]:
    """The results of the chunks of a piece: those of parts that are done are read, the others are made and written.

    Args:
        work: folder of the job.
        count: called with the number of bytes of each read of the input.

    Raises:
        DataError: an input cannot be read or has changed since the work was started, or a part cannot be written.
        ConfigError: the records have no such field, or an optional package is missing.
    """
    job, stem = job_of(work), Path(work) / f"{index:06d}"
    if (record := piece_record(work, index)) is not None:
        for part in range(record["parts"]):
            yield from _read(Path(f"{stem}-{part:04d}.part"))
        count(record["bytes_read"])
        return
    bytes_read = parts = 0

    def counted(size: int) -> None:
        nonlocal bytes_read
        bytes_read += size
        count(size)

    problems = ProblemLog()
    chunks = chunks_of(Corpus(job.pieces[index], job.corpus), problems, counted)
    while first := next(chunks, None):
        group = chain([first], islice(chunks, PART_CHUNKS - 1))
        path = Path(f"{stem}-{parts:04d}.part")
        if path.exists():
            deque(group, maxlen=0)
            yield from _read(path)
        else:
            yield from _written(path, map_chunks(partial(process_chunk, work), group), signed=job.options.near_duplicates)
        parts += 1
    for item in job.pieces[index]:
        if item.version is not None and item != item.now():
            raise DataError(f"{item.name} has changed while it was read", hint="run the same command again")
    found = [problem.model_dump(mode="json") for problem in problems.summary()]
    record = {"parts": parts, "bytes_read": bytes_read, "problems": found, "notes": problems.notes}
    write_bytes(stem.with_suffix(".json"), json.dumps(record).encode())


def make_piece(work: str, index: int) -> None:
    """Make all parts of a piece, in this process; does nothing if they are there."""
    if piece_record(work, index) is None:
        deque(piece_results(work, index), maxlen=0)


def piece_record(work: str, index: int) -> dict[str, Any] | None:
    """The record of a piece: number of parts, bytes read, problems and notes; None if the piece is not done."""
    path = Path(work) / f"{index:06d}.json"
    return json.loads(path.read_bytes()) if path.exists() else None


def signatures_of(work: Path) -> list[UInt[np.ndarray, "D 128"]]:
    """The signatures of all documents, in order, mapped into memory."""
    paths = [path for path in sorted(work.glob("*.signatures")) if path.stat().st_size]
    none = np.zeros((0, HASHES), dtype="<u4")
    return [none, *(np.memmap(path, dtype="<u4", mode="r").reshape(-1, HASHES) for path in paths)]


def chunks_of(
    text: Corpus, problems: ProblemLog, count: Callable[[int], None], errors: list[DiscernError] | None = None
) -> Iterator[Chunk]:
    """The documents of a text in chunks of about `CHUNK_CHARACTERS` characters, or as many bytes of token ids.

    Args:
        problems, count, errors: see `Corpus.documents`.
    """
    name, number = "", 0

    def begin(input_name: str) -> None:
        nonlocal name, number
        name, number = input_name, 0

    chunk, size = Chunk([], []), 0
    for document in text.documents(problems, count, errors, begin):
        number += 1
        if chunk.documents and isinstance(document, list) != isinstance(chunk.documents[0], list):
            yield chunk
            chunk, size = Chunk([], []), 0
        if not chunk.documents or number == 1:
            chunk.origins.append((len(chunk.documents), name, number))
        chunk.documents.append(document)
        size += sum(map(len, document)) if isinstance(document, list) else document.nbytes
        if size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = Chunk([], []), 0
    if chunk.documents:
        yield chunk


def _read(path: Path) -> Iterator[ChunkResult]:
    """The results in a part."""
    with path.open("rb") as file:
        while file.peek(1):
            yield ChunkResult.load(file)


def _written(path: Path, results: Iterator[ChunkResult], *, signed: object) -> Iterator[ChunkResult]:
    """Write results to a part, which appears when it is whole; yields each."""
    with ExitStack() as stack:
        file = stack.enter_context(replacing_file(path, wait=True))
        # Closed first: a part is whole only with its signatures.
        signatures = stack.enter_context(replacing_file(path.with_suffix(".signatures"), wait=True)) if signed else None
        for result in results:
            result.save(file)
            if signatures is not None and result.signatures is not None:
                signatures.write(result.signatures.astype("<u4").tobytes())
            yield result


def links_of_band(work: str, band: int) -> Int[np.ndarray, "E 2"]:
    """Pairs of near-duplicates that have an equal band of their signatures, by number in the order of the input."""
    similarity = job_of(work).options.near_duplicates
    assert similarity is not None
    return near_duplicates.links_of_band(signatures_of(Path(work)), band, similarity)
