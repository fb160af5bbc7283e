"""Scores of sentences, given or read from a file with one per line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from discern.data.tokenizer.unknown import UnknownTokens
from discern.errors import DataError
from discern.inference.scoring import Score, TextScorer
from discern.progress import Progress
from discern.tasks.readers.files import numbered_lines, stream_lines, without_blank_end

# Sentences are sorted by length in blocks of this size: large enough for little padding, small enough to be held in memory.
_BLOCK = 512


def score_lines(
    scorer: TextScorer, source: Path | Sequence[str], progress: Progress, warn: Callable[[str], None]
) -> Iterator[list[Score]]:
    """Scores of sentences, in order and in blocks; the memory for a file is bounded.

    Args:
        source: the sentences, or a UTF-8 file with one per line, plain or compressed; `-` is standard input.
        warn: called with messages about sentences that are read in several windows and skipped empty lines at the end.

    Raises:
        DataError: the file cannot be read or has no lines, or a line has no tokens; the scores before it were returned.
    """
    name, lines = _read(source, warn)
    progress.start("scoring", None, "sentences")
    unknown = UnknownTokens(scorer.tokenizer)
    longer = done = 0
    try:
        while block := list(islice(lines, _BLOCK)):
            scores = scorer.score([text for _, text in block])
            empty = next((place for place, score in enumerate(scores) if not score.tokens), len(scores))
            for (number, _), score in zip(block[:empty], scores, strict=False):
                if score.windows > 1 and not longer:
                    warn(f"{_place(name, number)}: {_too_long(score, scorer)}")
                longer += score.windows > 1
                unknown.add_tokens(score.tokens)
            yield scores[:empty]
            if empty < len(scores):
                raise _nothing(name, *block[empty])
            done += len(scores)
            progress.advance(len(scores))
    finally:
        progress.finish()
    if not done:
        raise DataError(f"{name or 'the text'} has no lines", hint="give a text with one sentence per line")
    if longer > 1:
        warn(f"{longer:,} of {done:,} sentences were scored in several windows")
    unknown.report(progress.note, warn)


def _read(source: Path | Sequence[str], warn: Callable[[str], None]) -> tuple[str | None, Iterator[tuple[int, str]]]:
    """The name of a file, None for given sentences; and the numbered sentences."""
    if not isinstance(source, Path):
        return None, iter(enumerate(source, 1))
    name = "standard input" if str(source) == "-" else str(source)
    lines = stream_lines(sys.stdin.buffer, name) if str(source) == "-" else numbered_lines(source)

    def left_out(first: int, last: int) -> None:
        where = f"{first} to {last}" if last > first else f"{first}"
        warn(f"{name}:{where}: empty lines at the end, skipped")

    return name, without_blank_end(lines, left_out)


def _place(name: str | None, number: int) -> str:
    return f"text {number}" if name is None else f"{name}:{number}"


def _too_long(score: Score, scorer: TextScorer) -> str:
    return (
        f"{len(score.tokens):,} tokens, and the model was trained on {scorer.window_size:,} at a time: "
        f"scored in {score.windows:,} overlapping windows, each token where it has most context"
    )


def _nothing(name: str | None, number: int, text: str) -> DataError:
    why = "contains nothing that the tokenizer keeps" if text.strip() else "is empty"
    if name is None:
        return DataError(f"{_place(name, number)} {why}, so there is nothing to score", hint="leave it out")
    return DataError(
        f"{_place(name, number)}: the line {why}, so there is nothing to score",
        hint="remove it, so that sentences and scores stay aligned: grep '[^[:space:]]' FILE removes empty lines",
    )
