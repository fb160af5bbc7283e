"""Check an input: what `prepare` would report of it, without writing anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from discern.data.curation.contamination import EvaluationFiles, OverlapSearch
from discern.data.curation.filters import Rules
from discern.data.dataset.build import BuildOptions, in_order, search_only, survey
from discern.data.executors import available_cores
from discern.data.reports import CheckReport
from discern.data.sources.corpus import Corpus, CorpusProgress
from discern.data.sources.documents import CorpusOptions, ProblemLog
from discern.data.tokenizer import load_tokenizer
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import DiscernError
from discern.progress import Progress


def check(
    inputs: Sequence[str],
    *,
    tokenizer: TokenizerChoice | None = None,
    corpus: CorpusOptions | None = None,
    build: BuildOptions | None = None,
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
    choice, build = tokenizer or TokenizerChoice(), build or BuildOptions(workers=available_cores())
    if choice.path or choice.train:
        choice.check()
    rules = Rules(build.filters)
    build.check()
    encoder = load_tokenizer(choice.path, choice.lowercase) if choice.path else None
    problems, errors = ProblemLog(), list[DiscernError]()
    text = Corpus(inputs, corpus or CorpusOptions(), exclude=exclude)
    if text.note is not None:
        progress.note(text.note)
    search = OverlapSearch(against) if against is not None else None
    reading = CorpusProgress(progress, "reading", text)
    documents = reading.read(problems, errors)
    statistics, filtered = None, Counter[str]()
    if encoder is not None:
        statistics, filtered = survey(documents, encoder, build, reading, search)
    elif search is not None:
        filtered = search_only(documents, search, build, reading)
    else:
        for document in documents:
            filtered.update(rules.apply([document])[1])
            reading.show()
        reading.finish()
    for line in problems.notes:
        progress.note(line)
    totals = (reading.documents, reading.sentences, reading.characters, reading.bytes_read)
    overlap = search.results() if search is not None else None
    left_out = in_order(filtered) if build.filters else None
    return CheckReport(*totals, statistics, problems.summary(), tuple(map(str, errors)), overlap, left_out)
