"""What `prepare` and `check` report, and the warnings to read before training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.data.curation.contamination import FileOverlap
from discern.data.dataset.manifest import Manifest, Statistics
from discern.data.sources.documents import Problem
from discern.data.tokenizer.unknown import OTHER_TOKENIZER, percent, unknown_warning

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
        statistics = manifest.statistics
        return {
            **statistics.model_dump(),
            "train_documents": manifest.splits["train"].num_documents,
            "heldout_documents": manifest.splits["heldout"].num_documents,
            "train_tokens": manifest.splits["train"].num_tokens,
            "heldout_tokens": manifest.splits["heldout"].num_tokens,
            "vocab_size": manifest.tokenizer.vocab_size,
            "tokenizer": manifest.tokenizer.model_dump(),
            "near_duplicates": manifest.near_duplicates.removed if manifest.near_duplicates is not None else None,
            "filtered": manifest.filtered,
            "fingerprint": manifest.fingerprint,
            "problems": [problem.model_dump() for problem in manifest.problems],
            "overlap": overlap_values(manifest.overlap),
            "unchanged": self.unchanged,
            "repaired": list(self.repaired),
            "seconds": self.seconds,
            "tokens_per_second": statistics.tokens / self.seconds,
        }


@dataclass(frozen=True)
class PartReport:
    """The result of `prepare_part`.

    Attributes:
        pieces: number of pieces of this share.
        of_pieces: number of pieces of all shares.
    """

    folder: Path
    part: int
    parts: int
    pieces: int
    of_pieces: int
    seconds: float

    def values(self) -> dict[str, Any]:
        """The result in one dictionary, as `--json` prints it."""
        return {name: value for name, value in vars(self).items() if name != "folder"}


@dataclass(frozen=True)
class CheckReport:
    """The result of `check`. Errors would stop `prepare`, problems would not.

    Attributes:
        statistics: None without a tokenizer.
        overlap: None without evaluation files.
        filtered: number of documents that filters would leave out, by filter and reason; None without filters.
    """

    documents: int
    sentences: int
    characters: int
    bytes_read: int
    statistics: Statistics | None
    problems: tuple[Problem, ...]
    errors: tuple[str, ...]
    overlap: tuple[FileOverlap, ...] | None = None
    filtered: dict[str, int] | None = None


def overlap_values(overlap: tuple[FileOverlap, ...] | None) -> list[dict[str, Any]] | None:
    """The overlap as `--json` prints it; None if the text was not compared with evaluation files."""
    return None if overlap is None else [each.model_dump(mode="json") for each in overlap]


def unknown_tokens_warning(statistics: Statistics) -> str | None:
    """A warning about the unknown tokens of a text, with their causes; None if they are few."""
    return unknown_warning(statistics.unknown_tokens, statistics.tokens, OTHER_TOKENIZER, statistics.unknown_causes)


def warnings_of(manifest: Manifest) -> list[str]:
    """Warnings to read before training on a data set."""
    statistics, heldout, asked = manifest.statistics, manifest.splits["heldout"], manifest.configuration
    unknown, fraction, copies = unknown_tokens_warning(statistics), float(asked["heldout"] or 0), statistics.duplicates
    found = [unknown] if unknown is not None else []
    by_line = "" if asked["documents"] == "line" else ", or with --documents line"
    part = heldout.num_tokens / statistics.tokens
    trained_on = 1 - max(part, heldout.num_documents / statistics.documents)
    if not fraction:
        found.append("no document is held out, so no evaluation is possible: give a --heldout fraction above 0, such as 0.01")
    elif not heldout.num_tokens:
        text = "all documents are copies of one" if copies else "the text is a single document"
        found.append(f"no document is held out, so no evaluation is possible, because {text}: use more text{by_line}")
    elif heldout.num_documents < FEW_HELDOUT_DOCUMENTS:
        number = "one document is" if heldout.num_documents == 1 else f"{heldout.num_documents} documents are"
        found.append(
            f"only {number} held out ({heldout.num_tokens:,} tokens, {percent(part)} of the text), so held-out metrics depend "
            f"more on that text than on the model: hold out more documents with a larger --heldout fraction{by_line}"
        )
    elif trained_on < _LEAST_TRAINED_ON * (1 - fraction):
        why, advice = "the documents are few or very long", f"give more text{by_line}"
        if 2 * copies >= heldout.num_documents:
            why = f"{copies:,} documents are copies of others, and all copies of a text are held out together"
            advice = "remove them with --near-duplicates 0.8, or choose other documents with another --seed"
        found.append(
            f"{heldout.num_documents:,} of {statistics.documents:,} documents ({percent(part)} of the tokens) are held out, "
            f"although --heldout is {fraction:g}, because {why}: {advice}"
        )
    return found
