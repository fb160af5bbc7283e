"""Check an input: what a careful colleague would say of it, without writing a data set."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from discern.data.curation.contamination import ContaminationSearch, EvaluationFiles, FileOverlap
from discern.data.curation.filters import language_of
from discern.data.curation.near_duplicates import banding, clusters, links_of_band
from discern.data.dataset.manifest import TOKENIZER_NAME, Statistics
from discern.data.dataset.writing import HeldoutSplit, StatisticsCounter
from discern.data.executors import ProcessExecutor, available_cores, ordered_map
from discern.data.job import Chunk, Job, PrepareOptions, chunks_of, process_chunk
from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import CorpusOptions, Problem, ProblemLog
from discern.data.tokenizer import SPECIAL_TOKENS, bert_wordpiece, load_tokenizer, special_ids
from discern.data.tokenizer.choice import TokenizerChoice
from discern.data.tokenizer.tokens import percent, unknown_warning
from discern.errors import DiscernError
from discern.progress import Progress
from discern.storage.files import write_bytes

_SIMILARITY = 0.8
_SIGNED = 50_000  # documents that are compared with each other: 512 bytes of memory each
_SHORT_DOCUMENT = 64  # tokens
_MANY_SENTENCES = 5  # in a line; a paragraph has fewer
_LINES = 1 << 18  # different lines whose number is counted
_SENTENCE_END = re.compile(r"[.!?…。！？]+[\"'”’)\]」]*(?=\s|$)|[。！？]")
_MARKUP = re.compile(r"</?[a-zA-Z][^<>\n]{0,200}>|&[a-z]{2,6};|\[\[|\]\]|\{\{|\}\}")
_MUCH_MARKUP = 0.005  # fraction of the characters
_FEW, _OFTEN = 10, 0.05  # documents, and fraction of the documents, from which a line may be boilerplate


@dataclass(frozen=True)
class CheckReport:
    """The result of `check`. Errors would stop `prepare`, problems would not.

    Attributes:
        statistics: counts of what filters keep; None without a tokenizer.
        languages: fraction of the documents by language, of a sample; empty if the extra `language` is not installed.
        advice: what to look at before training.
        filtered: number of documents that filters would leave out, by filter and reason; None without filters.
        overlap: None without evaluation files.
    """

    documents: int
    sentences: int
    characters: int
    statistics: Statistics | None
    languages: dict[str, float]
    advice: tuple[str, ...]
    problems: tuple[Problem, ...]
    errors: tuple[str, ...]
    overlap: tuple[FileOverlap, ...] | None
    filtered: dict[str, int] | None

    def values(self) -> dict[str, Any]:
        """The report as `--json` prints it; `remarks` are the problems in words."""
        return vars(self) | {
            "statistics": None if self.statistics is None else self.statistics.model_dump(),
            "problems": [problem.model_dump() for problem in self.problems],
            "remarks": [*map(str, self.problems)],
            "overlap": None if self.overlap is None else [each.model_dump(mode="json") for each in self.overlap],
        }


def check(
    inputs: Sequence[str],
    *,
    tokenizer: TokenizerChoice | None = None,
    corpus: CorpusOptions | None = None,
    options: PrepareOptions | None = None,
    exclude: Path | None = None,
    against: EvaluationFiles | None = None,
    progress: Progress,
) -> CheckReport:
    """Read the input and, if a tokenizer is given, tokenize it, to find what `prepare` would report. Writes nothing.

    Args:
        exclude: folder that is not input although it may lie in one.
        against: evaluation files to look for in the text.

    Raises:
        ConfigError: the arguments contradict each other, or the segmenter is not installed.
        DataError: the tokenizer or an evaluation file cannot be used, or an input does not exist. Problems inside the input
            are in the report instead.
    """
    choice, options = tokenizer or TokenizerChoice(), options or PrepareOptions(workers=available_cores())
    if choice.path or choice.train:
        choice.check()
    options.check()
    # Without a tokenizer, every word is one unknown token.
    words = bert_wordpiece({token: number for number, token in enumerate(SPECIAL_TOKENS.values())}, lowercase=False)
    encoder = load_tokenizer(choice.path, choice.lowercase, choice.keep_accents) if choice.path else words
    text = Corpus(inputs, corpus or CorpusOptions(), exclude=exclude)
    if text.note:
        progress.note(text.note)
    search = ContaminationSearch(against) if against else None
    problems, errors, totals = ProblemLog(), list[DiscernError](), Counter[str]()
    lines, languages = Counter[str](), Counter[str]()
    counter, signatures, bytes_read = StatisticsCounter(special_ids(encoder)["unk"]), list[np.ndarray](), 0

    def count(size: int) -> None:
        nonlocal bytes_read
        bytes_read += size

    def chunks() -> Iterator[Chunk]:
        for chunk in chunks_of(text, problems, count, errors):
            texts = [document for document in chunk.documents if isinstance(document, list)]
            totals["documents"] += len(chunk.documents)
            for document in texts:
                _count_lines(document, totals, lines)
            if texts and (language := language_of(texts[0])):
                languages[language] += 1
            yield chunk

    progress.start("reading", text.total_bytes, "bytes")
    with tempfile.TemporaryDirectory() as work, ProcessExecutor(options.workers) as executor:
        Job.of(text, options, "", against).write(Path(work))
        write_bytes(Path(work) / TOKENIZER_NAME, encoder.to_str().encode())
        shown = 0
        for result in ordered_map(executor, partial(process_chunk, work, signed=True), chunks(), pending=2 * options.workers):
            counter.add(result.block, result.counts)
            if search:
                search.add(result.counts["matches"])
            if sum(map(len, signatures)) < _SIGNED and result.signatures is not None:
                signatures.append(result.signatures)
            progress.advance(bytes_read - shown)
            shown = bytes_read
    progress.finish()
    for line in problems.notes:
        progress.note(line)
    statistics, advice = None, list[str]()
    if counter.documents:
        statistics = counter.finish(bytes_read)
        advice += _advice(totals, lines, statistics, "tokens" if choice.path else "words")
        advice += _copies(counter, signatures, options)
        if choice.path:
            advice += filter(None, [unknown_warning(statistics.unknown_tokens, statistics.tokens, statistics.unknown_causes)])
    return CheckReport(
        documents=totals["documents"],
        sentences=totals["lines"],
        characters=totals["characters"],
        statistics=statistics if choice.path else None,
        languages={code: number / languages.total() for code, number in languages.most_common()},
        advice=tuple(advice),
        problems=problems.summary(),
        errors=tuple(map(str, errors)),
        overlap=search.results() if search else None,
        filtered=dict(sorted(counter.filtered.items())) if options.filters else None,
    )


def _count_lines(document: list[str], totals: Counter[str], lines: Counter[str]) -> None:
    """Count the lines of a document, its characters, those of markup, and where sentences end; and in how many documents a line
    is, of the first different lines of at least 20 characters."""
    for line in document:
        ends = [match.end() for match in _SENTENCE_END.finditer(line)]
        totals["lines"] += 1
        totals["characters"] += len(line)
        totals["ends"] += len(ends)
        totals["ended"] += bool(ends) and ends[-1] == len(line)
        totals["markup"] += sum(map(len, _MARKUP.findall(line)))
    lines.update(line for line in set(document) if len(line) >= 20 and (line in lines or len(lines) < _LINES))


def _advice(totals: Counter[str], lines: Counter[str], statistics: Statistics, unit: str) -> Iterator[str]:
    """What the documents and their lines look like, where that is unusual."""
    median, documents = statistics.document_lengths["0.5"], totals["documents"]
    if median < _SHORT_DOCUMENT and documents >= _FEW:
        yield (
            f"the median document has {median} {unit}: if these are paragraphs of longer texts, --documents file makes each file "
            "one document"
        )
    if totals["lines"] > 2 * documents and totals["ended"] < 0.5 * totals["lines"]:
        yield (
            f"{percent(totals['ended'] / totals['lines'])} of the lines end a sentence: if the lines are wrapped, join those of "
            "a paragraph, as a line counts as a sentence"
        )
    elif totals["ends"] > _MANY_SENTENCES * totals["lines"]:
        yield (
            f"a line has {totals['ends'] / totals['lines']:.1f} sentences on average: the packing 'segments' cuts examples at "
            "lines, so write one sentence per line, or use the packing 'packed'"
        )
    if totals["markup"] > _MUCH_MARKUP * totals["characters"]:
        yield f"{percent(totals['markup'] / totals['characters'])} of characters are markup (tags, entities): extract the text"
    for line, number in lines.most_common(3):
        if number >= max(_FEW, _OFTEN * documents):
            yield f"the line {line[:60]!r} is in {number:,} of {documents:,} documents: remove it if it is boilerplate"


def _copies(counter: StatisticsCounter, signatures: list[np.ndarray], options: PrepareOptions) -> Iterator[str]:
    """How many documents are copies of others, and whether copies of held-out documents are trained on."""
    if exact := counter.duplicates:
        yield f"{exact:,} documents are copies of others: they are kept, in the same split; --near-duplicates 1 removes them"
    similarity = options.near_duplicates or _SIMILARITY
    links = [links_of_band(signatures, band, similarity) for band in range(banding(similarity)[0])]
    removed, _ = clusters(links, sum(map(len, signatures)))
    held = HeldoutSplit(options.heldout, options.seed).is_heldout(np.concatenate(counter.digests))
    pairs = np.concatenate(links)
    crossing = np.unique(pairs[held[pairs[:, 0]] != held[pairs[:, 1]]])
    if len(removed) > exact or len(crossing):
        yield (
            f"{len(removed):,} documents are near-duplicates of others (similarity of {similarity:g}), and "
            f"{held[crossing].sum():,} held-out documents have one that is trained on: remove them with --near-duplicates "
            f"{similarity:g}"
        )
