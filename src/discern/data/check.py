"""Check an input: what a careful colleague would say of it, without writing a data set."""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from discern.data.curation.contamination import ContaminationSearch, EvaluationFiles, FileOverlap
from discern.data.curation.filters import language_of
from discern.data.curation.near_duplicates import Banding, clusters, links_of_band
from discern.data.dataset.manifest import TOKENIZER_NAME, Statistics
from discern.data.dataset.writing import HeldoutSplit, StatisticsCounter, repeated
from discern.data.executors import ProcessExecutor, available_cores, ordered_map
from discern.data.job import Chunk, Job, PrepareOptions, chunks_of, process_chunk
from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import CorpusOptions, Document, Problem, ProblemLog
from discern.data.tokenizer import SPECIAL_TOKENS, bert_wordpiece, load_tokenizer, special_ids
from discern.data.tokenizer.choice import TokenizerChoice
from discern.data.tokenizer.tokens import OTHER_TOKENIZER, percent, unknown_warning
from discern.errors import DiscernError
from discern.progress import Progress

_SIMILARITY = 0.8
_SIGNED = 50_000  # documents that are compared with each other: 512 bytes of memory each
_SHORT_DOCUMENT = 64  # tokens
_LINES = 1 << 18  # different lines whose number is counted
_SENTENCE_END = re.compile(r"[.!?…。！？]+[\"'”’)\]」]*(?=\s|$)|[。！？]")
_MARKUP = re.compile(r"</?[a-zA-Z][^<>\n]{0,200}>|&[a-z]{2,6};|\[\[|\]\]|\{\{|\}\}")
_MUCH_MARKUP = 0.005  # fraction of the characters
_FEW, _OFTEN = 10, 0.05  # documents, and fraction of the documents, from which a line may be boilerplate


@dataclass
class Inspection:
    """Counts of the text itself, whatever the tokenizer.

    Attributes:
        ended: lines that end a sentence.
        ends: ends of sentences.
        markup: characters of tags, entities and wiki markup.
        lines: in how many documents a line is, of the first different lines of at least 20 characters.
        languages: documents by language, of a sample; empty if py3langid is not installed.
    """

    documents: int = 0
    sentences: int = 0
    characters: int = 0
    ended: int = 0
    ends: int = 0
    markup: int = 0
    lines: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)

    def add(self, document: Document) -> None:
        """Count a document."""
        self.documents += 1
        self.sentences += len(document)
        for line in document if isinstance(document, list) else ():
            ends = [match.end() for match in _SENTENCE_END.finditer(line)]
            self.characters += len(line)
            self.ends += len(ends)
            self.ended += bool(ends) and ends[-1] == len(line)
            self.markup += sum(len(match) for match in _MARKUP.findall(line))
        if isinstance(document, list):
            for line in {line for line in document if len(line) >= 20}:
                if line in self.lines or len(self.lines) < _LINES:
                    self.lines[line] += 1


@dataclass(frozen=True)
class CheckReport:
    """The result of `check`. Errors would stop `prepare`, problems would not.

    Attributes:
        statistics: counts of what filters keep; its tokens are words and punctuation marks if no tokenizer is given.
        tokenized: whether a tokenizer is given.
        languages: fraction of the documents by language, of a sample; empty if the extra `language` is not installed.
        advice: what to look at before training.
        filtered: number of documents that filters would leave out, by filter and reason; None without filters.
        overlap: None without evaluation files.
    """

    documents: int
    sentences: int
    characters: int
    statistics: Statistics
    tokenized: bool
    languages: dict[str, float]
    advice: tuple[str, ...]
    problems: tuple[Problem, ...]
    errors: tuple[str, ...]
    overlap: tuple[FileOverlap, ...] | None
    filtered: dict[str, int] | None


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
    options = replace(options, near_duplicates=options.near_duplicates or _SIMILARITY)
    if choice.path or choice.train:
        choice.check()
    options.check()
    # Without a tokenizer, every word is one unknown token.
    words = bert_wordpiece({token: number for number, token in enumerate(SPECIAL_TOKENS.values())}, lowercase=False)
    encoder = load_tokenizer(choice.path, choice.lowercase, choice.keep_accents) if choice.path else words
    text = Corpus(inputs, corpus or CorpusOptions(), exclude=exclude)
    if text.note is not None:
        progress.note(text.note)
    search = ContaminationSearch(against) if against is not None else None
    problems, errors, inspection = ProblemLog(), list[DiscernError](), Inspection()
    counter, signatures, signed, bytes_read = StatisticsCounter(special_ids(encoder)["unk"]), list[np.ndarray](), 0, 0

    def count(size: int) -> None:
        nonlocal bytes_read
        bytes_read += size

    def chunks() -> Iterator[Chunk]:
        for chunk in chunks_of(text, problems, count, errors):
            for document in chunk.documents:
                inspection.add(document)
            language = language_of(chunk.documents[0]) if isinstance(chunk.documents[0], list) else None
            if language is not None:
                inspection.languages[language] += 1
            yield chunk

    progress.start("reading", text.total_bytes, "bytes")
    with tempfile.TemporaryDirectory() as work, ProcessExecutor(options.workers) as executor:
        Job.of(text, options, "", against).write(Path(work))
        (Path(work) / TOKENIZER_NAME).write_text(encoder.to_str(), encoding="utf-8")
        shown = 0
        for result in ordered_map(executor, partial(process_chunk, work), chunks(), pending=2 * options.workers):
            counter.add(result.block, result.empty, result.unknown, result.filtered)
            if search is not None:
                search.add(result.matches)
            if signed < _SIGNED:
                signatures.append(result.signatures)
                signed += len(result.signatures)
            progress.advance(bytes_read - shown)
            shown = bytes_read
    progress.finish()
    for line in problems.notes:
        progress.note(line)
    statistics = counter.finish(bytes_read)
    sample = sum(inspection.languages.values())
    advice = [*_advice(inspection, statistics, "tokens" if choice.path else "words"), *_copies(counter, signatures, options)]
    if choice.path:
        unknown = unknown_warning(statistics.unknown_tokens, statistics.tokens, OTHER_TOKENIZER, statistics.unknown_causes)
        advice += [unknown] if unknown is not None else []
    return CheckReport(
        documents=inspection.documents,
        sentences=inspection.sentences,
        characters=inspection.characters,
        statistics=statistics,
        tokenized=choice.path is not None,
        languages={code: number / sample for code, number in inspection.languages.most_common()},
        advice=tuple(advice),
        problems=problems.summary(),
        errors=tuple(map(str, errors)),
        overlap=search.results() if search is not None else None,
        filtered=counter.filtered if options.filters else None,
    )


def _advice(text: Inspection, statistics: Statistics, unit: str) -> Iterator[str]:
    """What the documents and their lines look like, where that is unusual."""
    if not statistics.documents:
        return
    median = statistics.document_lengths["0.5"]
    if median < _SHORT_DOCUMENT and statistics.documents >= _FEW:
        yield (
            f"the median document has {median} {unit}: if these are paragraphs of longer texts, --documents file makes each file "
            "one document"
        )
    if text.sentences > 2 * text.documents and text.ended < 0.5 * text.sentences:
        yield (
            f"{percent(text.ended / text.sentences)} of the lines end a sentence: if the lines are wrapped, join those of a "
            "paragraph, as a line counts as a sentence"
        )
    elif text.ends > 2 * text.sentences:
        yield (
            f"a line has {text.ends / text.sentences:.1f} sentences on average: the packing 'segments' cuts examples at lines, "
            "so write one sentence per line, or use the packing 'packed'"
        )
    if text.markup > _MUCH_MARKUP * text.characters:
        yield f"{percent(text.markup / text.characters)} of the characters are markup (tags, entities): extract the text first"
    for line, number in text.lines.most_common(3):
        if number >= max(_FEW, _OFTEN * text.documents):
            yield f"the line {line[:60]!r} is in {number:,} of {text.documents:,} documents: remove it if it is boilerplate"


def _copies(counter: StatisticsCounter, signatures: list[np.ndarray], options: PrepareOptions) -> Iterator[str]:
    """How many documents are copies of others, and whether copies of held-out documents are trained on."""
    if not counter.digests:
        return
    if exact := repeated(counter.digests):
        yield f"{exact:,} documents are copies of others: they are kept, in the same split; --near-duplicates 1 removes them"
    similarity = options.near_duplicates
    assert similarity is not None
    links = [links_of_band(signatures, band, similarity) for band in range(Banding.of(similarity).bands)]
    removed, _ = clusters(links, sum(map(len, signatures)))
    digests = np.concatenate(counter.digests)[: sum(map(len, signatures))]
    held = HeldoutSplit(options.heldout, options.seed).is_heldout(digests)
    pairs = np.concatenate(links)
    crossing = pairs[held[pairs[:, 0]] != held[pairs[:, 1]]].ravel()
    leaked = len(np.unique(crossing[held[crossing]]))
    if len(removed) > exact or leaked:
        yield (
            f"{len(removed):,} of {len(digests):,} documents are near-duplicates of others (similarity of {similarity:g}), and "
            f"{leaked:,} held-out documents have one that is trained on: remove them with --near-duplicates {similarity:g}"
        )
