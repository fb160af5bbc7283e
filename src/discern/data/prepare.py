"""Prepare a data set: text through a tokenizer into shards."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.data.dataset.build import BuildOptions, build_shards, search_only, survey
from discern.data.dataset.manifest import Manifest, Statistics
from discern.data.dataset.publish import (
    configuration,
    describe,
    existing_data_set,
    other_data_set,
    refuse_foreign,
    repair,
    write_header,
)
from discern.data.overlap import EvaluationFiles, FileOverlap, OverlapSearch
from discern.data.sources.corpus import Corpus, CorpusProgress
from discern.data.sources.documents import CorpusOptions
from discern.data.sources.problems import Problem, ProblemLog
from discern.data.tokenizer import load_tokenizer
from discern.data.tokenizer.choice import TokenizerChoice, train_on
from discern.data.tokenizer.languages import find_language
from discern.data.tokenizer.unknown import OTHER_TOKENIZER, unknown_warning
from discern.data.tokenizer.words import SegmenterName, check_segmenter
from discern.errors import ConfigError, DataError, DiscernError
from discern.progress import Progress
from discern.storage.guard import check_not_inside
from discern.storage.output import OutputFolder

_LONGEST_LICENSE = 200
FEW_HELDOUT_DOCUMENTS = 10
"""With fewer held-out documents, metrics depend on which documents are held out."""


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


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
    spoken = find_language(code)
    chosen = segmenter or spoken.installed_segmenter()
    if segmenter is None and chosen != spoken.segmenter:
        warn(
            f"{spoken.name} words are not segmented, as {spoken.segmenter} is not installed; to mask whole words: "
            "pip install 'discern-nlp[zh]'"
        )
    return spoken.completed(choice), chosen, spoken.code


@dataclass(frozen=True)
class PrepareReport:
    """The result of `prepare`.

    Attributes:
        unchanged: whether the data set already existed with identical content. Its record of `overlap` may be new.
        repaired: names of the files that were damaged or missing in an existing data set and have been replaced.
    """

    folder: Path
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
            "fingerprint": manifest.fingerprint,
            "problems": [problem.model_dump() for problem in manifest.problems],
            "overlap": overlap_values(manifest.overlap),
            "unchanged": self.unchanged,
            "repaired": list(self.repaired),
            "seconds": self.seconds,
            "tokens_per_second": statistics.tokens / self.seconds,
        }


@dataclass(frozen=True)
class CheckReport:
    """The result of `check`. Errors would stop `prepare`, problems would not.

    Attributes:
        statistics: None without a tokenizer.
        overlap: None without evaluation files.
    """

    documents: int
    sentences: int
    characters: int
    bytes_read: int
    statistics: Statistics | None
    problems: tuple[Problem, ...]
    errors: tuple[str, ...]
    overlap: tuple[FileOverlap, ...] | None = None


def overlap_values(overlap: tuple[FileOverlap, ...] | None) -> list[dict[str, Any]] | None:
    """The overlap as `--json` prints it; None if the text was not compared with evaluation files."""
    return None if overlap is None else [each.model_dump(mode="json") for each in overlap]


def prepare(
    inputs: Sequence[str],
    *,
    out: Path,
    tokenizer: TokenizerChoice,
    corpus: CorpusOptions | None = None,
    build: BuildOptions | None = None,
    overwrite: bool = False,
    language: str | None = None,
    license: str | None = None,
    against: EvaluationFiles | None = None,
    progress: Progress,
) -> PrepareReport:
    """Make a data set from text. `out` is either complete or absent.

    Args:
        inputs: files, folders, glob patterns, `-` or `hf:NAME`.
        tokenizer: the tokenizer to use, or the kind to train.
        corpus: how the input becomes documents.
        build: how documents become shards.
        overwrite: replace another data set in `out`.
        language: code of the language of the text, for model cards.
        license: license of the text, for model cards.
        against: evaluation files to look for in the text; their overlap is recorded in the manifest, for model cards.

    Raises:
        ConfigError: the arguments contradict each other, the segmenter is not installed, or `out` holds something else.
        DataError: the input, the tokenizer or an evaluation file cannot be used, or `out` cannot be written.
    """
    began = time.monotonic()
    corpus, build = corpus or CorpusOptions(), build or BuildOptions(workers=available_cores())
    tokenizer.check()
    OutputFolder(out).check(*map(Path, inputs))
    check_not_inside("--out", out, tokenizer.path)
    check_segmenter(build.segmenter)
    encoder = load_tokenizer(tokenizer.path, tokenizer.lowercase) if tokenizer.path else None
    settings = configuration(tokenizer, corpus, build, language, _one_line(license))
    target = out.resolve()
    before = existing_data_set(target, settings, overwrite)
    text = Corpus(inputs, corpus, exclude=target)
    search = OverlapSearch(against) if against is not None else None
    problems = ProblemLog()
    with _advising_on_interruption(out, progress), OutputFolder(target).staged() as folder:
        trained = None
        if encoder is None:
            trained = train_on(text, tokenizer, build.seed, build.workers, progress)
            encoder = trained.tokenizer
        reading = CorpusProgress(progress, "tokenizing", text)
        built = build_shards(reading.read(problems), encoder, build, folder.path, reading, search)
        for line in problems.notes:
            progress.note(line)
        if not built.statistics.documents:
            found = "".join(f"; {problem}" for problem in problems.summary())
            raise DataError(f"the input contains no text{found}", hint="look at the input with: discern prepare INPUT --check")
        info = describe(encoder, trained)
        # What is known of the same text is kept.
        overlap = search.results() if search is not None else before.overlap if before is not None else None
        manifest = write_header(folder.path, encoder, info, built, tuple(inputs), settings, problems.summary(), overlap)
        unchanged = before is not None and before.fingerprint == manifest.fingerprint
        if before is not None and not unchanged:
            raise other_data_set(out, "made of other text")
        repaired = repair(folder, before, manifest) if before is not None else ()
        if before is None:
            if overwrite and target.is_dir():
                refuse_foreign(target)  # put there meanwhile
            folder.publish(replace=overwrite)
    return PrepareReport(out, manifest, time.monotonic() - began, unchanged and not repaired, repaired)


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
    check_segmenter(build.segmenter)
    encoder = load_tokenizer(choice.path, choice.lowercase) if choice.path else None
    problems, errors = ProblemLog(), list[DiscernError]()
    text = Corpus(inputs, corpus or CorpusOptions(), exclude=exclude)
    search = OverlapSearch(against) if against is not None else None
    reading = CorpusProgress(progress, "reading", text)
    documents = reading.read(problems, errors)
    statistics = None
    if encoder is not None:
        statistics = survey(documents, encoder, build, reading, search)
    elif search is not None:
        search_only(documents, search, build, reading)
    else:
        for _ in documents:
            reading.show()
        reading.finish()
    for line in problems.notes:
        progress.note(line)
    totals = (reading.documents, reading.sentences, reading.characters, reading.bytes_read)
    overlap = search.results() if search is not None else None
    return CheckReport(*totals, statistics, problems.summary(), tuple(map(str, errors)), overlap)


def warnings_of(manifest: Manifest) -> list[str]:
    """Warnings to read before training on a data set."""
    found = []
    unknown = unknown_warning(manifest.statistics.unknown_tokens, manifest.statistics.tokens, OTHER_TOKENIZER)
    if unknown is not None:
        found.append(unknown)
    heldout = manifest.splits["heldout"]
    if not heldout.num_tokens:
        found.append("no document is held out, so no evaluation is possible: use more text, or --documents line")
    elif heldout.num_documents < FEW_HELDOUT_DOCUMENTS:
        number = "one document is" if heldout.num_documents == 1 else f"{heldout.num_documents} documents are"
        found.append(
            f"only {number} held out ({heldout.num_tokens:,} tokens), so held-out metrics depend on that text more than on "
            "the model: hold out more documents with a larger --heldout fraction, or with --documents line"
        )
    return found


def _one_line(license: str | None) -> str | None:
    """The license as model cards show it.

    Raises:
        ConfigError: the license is empty, or more than a name.
    """
    if license is None:
        return None
    if not license.strip() or not license.isprintable() or len(license) > _LONGEST_LICENSE:
        raise ConfigError(
            f"the license is {license!r:.80}, expected its name in one line of at most {_LONGEST_LICENSE} characters",
            hint="for example --license 'CC BY-SA 3.0'",
        )
    return license.strip()


@contextmanager
def _advising_on_interruption(out: Path, progress: Progress) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        progress.finish()
        progress.note(f"interrupted: {out} is unchanged. Run the same command again to prepare it.")
        raise
