"""Scores of sentences, given or read from a file with one per line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from discern.data.tables import without_blank_end
from discern.errors import DataError
from discern.inference.scoring import Score, TextScorer
from discern.inference.texts import InputText, TextReport, input_lines
from discern.progress import Progress

# Sentences are sorted by length in blocks of this size: large enough for little padding, small enough to be held in memory.
_BLOCK = 512


def score_lines(
    scorer: TextScorer, source: Path | Sequence[str], progress: Progress, warn: Callable[[str], None]
) -> Iterator[list[Score]]:
    """Scores of sentences, in order and in blocks; the memory for a file is bounded.

    Args:
        source: the sentences, or a UTF-8 file with one per line, plain or compressed; `-` is standard input.
        warn: called with messages about sentences that are read in several windows.

    Raises:
        DataError: the file cannot be read or has no lines, or a line has no tokens; the scores before it were returned.
    """
    lines = _read(source)
    progress.start("scoring", None, "sentences")
    report = TextReport(scorer.tokenizer, scorer.window_size, progress, warn)
    done = 0
    try:
        while block := list(islice(lines, _BLOCK)):
            scores = scorer.score([each.text for each in block])
            empty = next((place for place, score in enumerate(scores) if not score.tokens), len(scores))
            for each, score in zip(block[:empty], scores, strict=False):
                report.add(each.where, score.tokens)
            yield scores[:empty]
            if empty < len(scores):
                why = "contains nothing that the tokenizer keeps" if block[empty].text.strip() else "is empty"
                raise DataError(
                    f"{block[empty].where} {why}, so there is nothing to score",
                    hint="leave it out; grep '[^[:space:]]' FILE removes empty lines, so that sentences and scores stay aligned",
                )
            done += len(scores)
            progress.advance(len(scores))
    finally:
        progress.finish()
    if not done:
        raise DataError(
            f"{input_lines(source)[0] if isinstance(source, Path) else 'the text'} has no lines",
            hint="give one sentence per line",
        )
    report.finish()


def _read(source: Path | Sequence[str]) -> Iterator[InputText]:
    if not isinstance(source, Path):
        return (InputText(f"text {number}", number, text) for number, text in enumerate(source, 1))
    name, lines = input_lines(source)
    return (InputText(f"{name}:{number}", number, text) for number, text in without_blank_end(lines))
