"""Prepare a data set: text through a tokenizer into shards.

The inputs are cut into pieces, and a worker reads, filters and tokenizes each into a part, see `discern.data.job`. Here the parts
are merged: documents get their splits, and the shards are written in order. So the data set is the same, byte for byte, wherever
the work runs, by how many workers, and however often it was interrupted.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
from jaxtyping import Int
from tokenizers import Tokenizer

from discern.data.curation.contamination import ContaminationSearch, EvaluationFiles
from discern.data.curation.filters import all_left_out
from discern.data.curation.near_duplicates import banding, clusters
from discern.data.dataset.manifest import (
    COUNTS_NAME,
    SPLITS,
    TOKENIZER_NAME,
    FileInfo,
    Manifest,
    NearDuplicates,
    Setting,
    SplitInfo,
    SplitName,
    TokenizerInfo,
    data_fingerprint,
)
from discern.data.dataset.publish import existing_data_set, other_data_set, refuse_foreign, repair, write_header
from discern.data.dataset.remote import uploaded
from discern.data.dataset.writing import HeldoutSplit, Placed, SplitWriter, StatisticsCounter
from discern.data.executors import EngineName, ProcessExecutor, RayExecutor, available_cores, ordered_map
from discern.data.job import (
    ChunkMap,
    ChunkResult,
    Job,
    PrepareOptions,
    folders_beside,
    links_of_band,
    make_piece,
    piece_record,
    piece_results,
    signatures_of,
)
from discern.data.languages import LANGUAGES, SEGMENTERS, SegmenterName, find_language
from discern.data.remote import remote_address, shown
from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import CorpusOptions, Problem, ProblemLog
from discern.data.tokenizer import fingerprint, load_tokenizer, lowercases, prepared, special_ids, strips_accents, vocab_size
from discern.data.tokenizer.choice import TokenizerChoice, train_on
from discern.data.tokenizer.encoding import token_dtype
from discern.data.tokenizer.tokens import percent, unknown_warning
from discern.errors import ConfigError, DataError, counted
from discern.progress import Progress
from discern.storage.files import OutputFolder, cannot_write, check_apart, write_bytes

FEW_HELDOUT_DOCUMENTS = 10
"""With fewer held-out documents, metrics depend on which documents are held out."""
_LEAST_TRAINED_ON = 0.8
"""Fraction of the text to train on, of the fraction that was asked for, below which the held-out part is too large."""


@dataclass(frozen=True)
class PrepareReport:
    """The result of `prepare`.

    Attributes:
        folder: folder or address of the data set.
        unchanged: whether the data set already existed with identical content. Its record of `overlap` may be new.
        repaired: names of the files that were damaged or missing in an existing data set and have been replaced.
    """

    folder: Path | str
    manifest: Manifest
    seconds: float
    unchanged: bool
    repaired: tuple[str, ...] = ()

    def values(self) -> dict[str, Any]:
        """Statistics and properties of the data set in one dictionary, as `--json` prints it."""
        manifest = self.manifest
        near = manifest.near_duplicates
        return {
            **manifest.statistics.model_dump(),
            **{
                f"{name}_{unit}": getattr(manifest.splits[name], f"num_{unit}")
                for unit in ("documents", "tokens")
                for name in SPLITS
            },
            "vocab_size": manifest.tokenizer.vocab_size,
            **manifest.model_dump(mode="json", include={"tokenizer", "filtered", "fingerprint", "problems", "overlap"}),
            "near_duplicates": near.removed if near else None,
            "segmenter": manifest.configuration.get("segmenter"),
            "unchanged": self.unchanged,
            "repaired": list(self.repaired),
            "seconds": self.seconds,
            "tokens_per_second": manifest.statistics.tokens / self.seconds,
        }


def in_language(
    code: str | None, choice: TokenizerChoice, segmenter: SegmenterName | None, warn: Callable[[str], None]
) -> tuple[TokenizerChoice, SegmenterName, str | None]:
    """Tokenizer, segmenter and code of a language. Choices that were left open take the defaults of the language.

    Args:
        code: ISO 639-1 code; None if unknown.
        warn: called if the segmenter of the language is not installed.

    Raises:
        ConfigError: the language is unknown.
    """
    if code is None:
        return choice, segmenter or "none", None
    code = find_language(code)
    suited = SEGMENTERS.get(code, "none")
    if segmenter is None and suited != "none" and find_spec(suited) is None:
        warn(
            f"{LANGUAGES[code]} words are not segmented, as {suited} is not installed; to mask whole words: "
            f"pip install 'discern-nlp[{code}]'"
        )
        suited = "none"
    return choice.in_language(code), segmenter or suited, code


def prepare(
    inputs: Sequence[str],
    *,
    out: Path,
    tokenizer: TokenizerChoice,
    corpus: CorpusOptions | None = None,
    options: PrepareOptions | None = None,
    overwrite: bool = False,
    against: EvaluationFiles | None = None,
    engine: EngineName = "local",
    progress: Progress,
) -> PrepareReport:
    """Make a data set from text. `out` is either complete or absent; it may be an address such as `s3://BUCKET/DATA`.

    What is done stays beside `out` until that is complete, so that the same call continues after an interruption.

    Args:
        inputs: files, folders, glob patterns, addresses (`https://`, `s3://`, `gs://`, `hf://`), `-` or `hf:NAME`.
        tokenizer: the tokenizer to use, or the kind to train.
        corpus: how the input becomes documents.
        options: how documents become shards.
        overwrite: replace another data set in `out`.
        against: evaluation files to look for in the text; their overlap is recorded in the manifest, for model cards.
        engine: where the work runs: in processes on this machine, or on a Ray cluster.

    Raises:
        ConfigError: the arguments contradict each other, the segmenter or the engine is not installed, or `out` holds something
            else.
        DataError: the input, the tokenizer or an evaluation file cannot be used, or `out` cannot be written.
    """
    corpus, options = corpus or CorpusOptions(), options or PrepareOptions(workers=available_cores())
    if (address := remote_address(out)) is not None:

        def make(folder: Path) -> PrepareReport:
            return prepare(
                inputs,
                out=folder,
                tokenizer=tokenizer,
                corpus=corpus,
                options=options,
                overwrite=overwrite,
                against=against,
                engine=engine,
                progress=progress,
            )

        return uploaded(address, make, overwrite=overwrite, progress=progress)

    # Check everything that needs no work
    began = time.monotonic()
    tokenizer.check()
    options.check()
    check_apart(out, *map(Path, inputs))
    given = load_tokenizer(tokenizer.path, tokenizer.lowercase, tokenizer.keep_accents) if tokenizer.path else None
    settings, target = configuration(tokenizer, corpus, options), out.resolve()
    before = existing_data_set(target, settings, overwrite)
    if before is not None and given is not None and fingerprint(given) != before.tokenizer.fingerprint:
        raise other_data_set(out, "made with another tokenizer")
    text = Corpus(inputs, corpus, exclude=target)
    if text.note:
        progress.note(text.note)
    if engine == "ray" and not text.rereadable:
        raise ConfigError("--engine ray cannot read standard input or a pipe", hint="save the text to a file first")
    search = ContaminationSearch(against) if against else None
    job = Job.of(text, options, fingerprint(given) if given is not None else repr(tokenizer), against)

    with OutputFolder(target).staged() as folder, _work_folder(job, target, progress, keep=text.rereadable) as work:
        # A tokenizer that was trained before an interruption is not trained again.
        path, encoder = work / TOKENIZER_NAME, given
        if encoder is None and path.is_file():
            encoder = prepared(Tokenizer.from_file(str(path)), "the tokenizer")
        elif encoder is None:
            encoder = train_on(text, tokenizer, options.seed, options.workers, progress, options.filters)
        write_bytes(path, encoder.to_str().encode())
        with RayExecutor(options.workers) if engine == "ray" else ProcessExecutor(options.workers) as executor:
            # On a cluster, a task reads a piece. On this machine, this process reads, and the others tokenize.
            map_chunks: ChunkMap = map
            if engine == "local":
                map_chunks = partial(ordered_map, executor, pending=2 * options.workers)
            else:
                progress.start("tokenizing", len(job.pieces), "pieces")
                for future in as_completed([executor.submit(make_piece, str(work), index) for index in range(len(job.pieces))]):
                    future.result()
                    progress.advance(1)
                progress.finish()
            near_duplicates, removed = None, np.zeros(0, dtype=np.int64)
            if options.near_duplicates is not None:
                deque(_results(job, work, map_chunks, progress, "tokenizing", text.total_bytes), maxlen=0)
                near_duplicates, removed = _near_duplicates(work, options.near_duplicates, executor, progress)
            done = engine == "ray" or options.near_duplicates is not None
            results = _results(job, work, map_chunks, progress, "merging" if done else "tokenizing", text.total_bytes)
            splits, token_counts, counter = _merge(results, removed, options, encoder, folder.path, search)
        records = [record for index in range(len(job.pieces)) if (record := piece_record(str(work), index))]
        problems = ProblemLog()
        for record in records:
            for problem in record["problems"]:
                problems.merge(Problem.model_validate(problem))
        for note in dict.fromkeys(note for record in records for note in record["notes"]):
            progress.note(note)
        if not counter.documents:
            if counter.filtered:
                raise all_left_out(counter.filtered)
            found = "".join(f"; {problem}" for problem in problems.summary())
            raise DataError(f"the input contains no text{found}", hint="look at the input with: discern prepare INPUT --check")
        info = TokenizerInfo(
            fingerprint=fingerprint(encoder),
            kind=type(encoder.model).__name__.lower(),
            vocab_size=vocab_size(encoder),
            special_tokens=special_ids(encoder),
            lowercase=lowercases(encoder),
            strips_accents=strips_accents(encoder),
        )
        manifest = Manifest(
            fingerprint=data_fingerprint(info.fingerprint, splits),
            dtype=token_dtype(info.vocab_size).name,
            tokenizer=info,
            splits=splits,
            token_counts=token_counts,
            statistics=counter.finish(sum(record["bytes_read"] for record in records)),
            problems=problems.summary(),
            inputs=tuple(map(shown, inputs)),
            configuration=settings,
            versions=job.versions,
            # What is known of the same text is kept.
            overlap=search.results() if search else before.overlap if before is not None else None,
            near_duplicates=near_duplicates,
            filtered=dict(sorted(counter.filtered.items())) if options.filters else None,
        )
        write_header(folder.path, encoder, manifest)
        repaired: tuple[str, ...] = ()
        if before is None:
            if overwrite and target.is_dir():
                refuse_foreign(target)  # put there meanwhile
            folder.publish(replace=overwrite)
        elif before.fingerprint != manifest.fingerprint:
            raise other_data_set(out, "made from different text")
        else:
            repaired = repair(folder, manifest)
    return PrepareReport(out, manifest, time.monotonic() - began, before is not None and not repaired, repaired)


def configuration(choice: TokenizerChoice, corpus: CorpusOptions, options: PrepareOptions) -> dict[str, Setting]:
    """Every setting that affects the output, and the language and license of the text."""
    settings = vars(choice) | vars(corpus) | vars(options) | {"vocab_size": choice.size if choice.train else None}
    left_out = ("path", "workers")
    return {name: value for name, value in settings.items() if name not in left_out and value not in (None, ())}


@contextmanager
def _work_folder(job: Job, target: Path, progress: Progress, *, keep: bool) -> Iterator[Path]:
    """The folder of the job. It is removed when the data set is complete, with those of other work on it, or if it holds no part.

    Args:
        keep: keep the parts of an interrupted work; the input can be read again.
    """
    work = job.folder_beside(target)
    try:
        job.write(work)
        yield work
    except BaseException as problem:
        if not (keep and any(work.glob("*.part"))):
            shutil.rmtree(work, ignore_errors=True)
        if isinstance(problem, OSError):
            raise cannot_write(target, problem) from problem
        if isinstance(problem, KeyboardInterrupt | SystemExit):
            progress.finish()
            problem.args = (f"interrupted: {target} is unchanged. Run the same command again to continue.",)
            progress.note(problem.args[0])
        raise
    for each in folders_beside(target):
        shutil.rmtree(each, ignore_errors=True)


def _results(
    job: Job, work: Path, map_chunks: ChunkMap, progress: Progress, doing: str, total: int | None
) -> Generator[ChunkResult]:
    """The results of all pieces in order, with a bar in bytes of the input, of which there are `total` if that is known."""
    read = shown = tokens = 0

    def count(size: int) -> None:
        nonlocal read
        read += size

    progress.start(doing, total, "bytes")
    for index in range(len(job.pieces)):
        for result in piece_results(str(work), index, map_chunks, count):
            yield result
            tokens += len(result.block.tokens)
            progress.advance(read - shown, tokens=f"{tokens:,}")
            shown = read
    progress.finish()


def _near_duplicates(
    work: Path, similarity: float, executor: Executor, progress: Progress
) -> tuple[NearDuplicates, Int[np.ndarray, " R"]]:
    """The entry of near-duplicates in the manifest, and the numbers of the documents to remove."""
    bands, rows = banding(similarity)
    progress.start(f"comparing documents in {bands} bands of their signatures", None, "")
    links = executor.map(partial(links_of_band, str(work)), range(bands))
    removed, sizes = clusters(links, sum(map(len, signatures_of(work))))
    progress.finish()
    entry = NearDuplicates(
        similarity=similarity,
        bands=bands,
        rows=rows,
        clusters=sizes.total(),
        removed=len(removed),
        cluster_sizes={str(size): sizes[size] for size in sorted(sizes)},
    )
    return entry, removed


def _merge(
    results: Generator[ChunkResult],
    removed: Int[np.ndarray, " R"],
    options: PrepareOptions,
    tokenizer: Tokenizer,
    folder: Path,
    search: ContaminationSearch | None,
) -> tuple[dict[SplitName, SplitInfo], FileInfo, StatisticsCounter]:
    """Write the documents into shards, with the counts of the tokens to train on.

    Args:
        removed: numbers of the documents that are left out.
        folder: existing folder for the shards.
        search: search for the examples of evaluation files in the documents, if asked for.
    """
    counter, chooser = StatisticsCounter(special_ids(tokenizer)["unk"]), HeldoutSplit(options.heldout, options.seed)
    counts, first = np.zeros(vocab_size(tokenizer), dtype="<i8"), 0
    with ExitStack() as stack:
        writers = {name: stack.enter_context(SplitWriter(folder, name, options.shard_tokens)) for name in SPLITS}

        def write(placed: Placed) -> None:
            for split, block in placed:
                writers[split].append(block)
                if split == "train":
                    np.add(counts, np.bincount(block.tokens, minlength=len(counts)), out=counts)

        for result in stack.enter_context(closing(results)):
            kept, last = np.ones(result.block.num_documents, dtype=bool), first + result.block.num_documents
            kept[removed[slice(*np.searchsorted(removed, [first, last]))] - first] = False
            block, first = result.block.select(kept), last
            counter.add(block, result.counts)
            write(chooser.place(block))
            if search:
                search.add(result.counts["matches"])
        write(chooser.finish())
        splits = {name: writer.finish() for name, writer in writers.items()}
    raw = counts.tobytes()
    write_bytes(folder / COUNTS_NAME, raw)
    return splits, FileInfo(size=len(raw), sha256=hashlib.sha256(raw).hexdigest()), counter


def warnings_of(manifest: Manifest) -> list[str]:
    """Warnings to read before training on a data set."""
    statistics, heldout, settings = manifest.statistics, manifest.splits["heldout"], manifest.configuration
    unknown = unknown_warning(statistics.unknown_tokens, statistics.tokens, statistics.unknown_causes)
    fraction, copies = cast(float, settings["heldout"]), statistics.duplicates
    found = [unknown] if unknown else []
    by_line = "" if settings["documents"] == "line" else ", or with --documents line"
    part = heldout.num_tokens / statistics.tokens
    trained_on = 1 - max(part, heldout.num_documents / statistics.documents)
    if not fraction:
        found.append("no document is held out, so no evaluation is possible: give a --heldout fraction above 0, such as 0.01")
    elif not heldout.num_tokens:
        text = "all documents are copies of one" if copies else "the text is a single document"
        found.append(f"no document is held out, so no evaluation is possible, because {text}: use more text{by_line}")
    elif heldout.num_documents < FEW_HELDOUT_DOCUMENTS:
        found.append(
            f"the held-out split has only {counted(heldout.num_documents, 'document')} ({heldout.num_tokens:,} tokens, "
            f"{percent(part)} of the text), so held-out metrics depend more on that text than on the model: hold out more "
            f"documents with a larger --heldout fraction{by_line}"
        )
    elif trained_on < _LEAST_TRAINED_ON * (1 - fraction):
        found.append(
            f"{heldout.num_documents:,} of {statistics.documents:,} documents ({percent(part)} of the tokens) are held out, "
            f"although --heldout is {fraction:g}: all copies of a text are held out together ({copies:,} documents are copies), "
            f"and so is a long document; remove copies with --near-duplicates 0.8, or give more text{by_line}"
        )
    return found
