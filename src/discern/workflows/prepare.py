"""`discern prepare`: text to a tokenised data set. The parts live in `discern.data`; here they meet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from discern.artifacts.guard import check_folder, check_not_inside
from discern.data.build import BuildOptions, build, survey
from discern.data.corpus import Corpus, CorpusOptions
from discern.data.header import configuration, write_header
from discern.data.languages import find_language
from discern.data.manifest import Manifest, Statistics
from discern.data.meter import Meter
from discern.data.problems import Problem, ProblemLog
from discern.data.publish import another, refuse_foreign, repair, staging, standing
from discern.data.tokenizer import load_tokenizer
from discern.data.tokenizer_choice import TokenizerChoice, describe, train_on
from discern.data.unknown import OTHER_TOKENIZER, unknown_warning
from discern.data.words import SegmenterName, check_segmenter
from discern.errors import ConfigError, DataError, DiscernError
from discern.progress import Progress

_LONGEST_LICENSE = 200
FEW_HELDOUT_DOCUMENTS = 10
"""With fewer held-out documents, held-out figures depend on the choice of documents."""


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class PrepareRequest:
    """What to prepare, from what, into which folder.

    Attributes:
        inputs: files, folders, glob patterns, `-` or `hf:NAME`.
        out: folder of the data set; None only for `check`.
        tokenizer: which one, or which to train; `check` does without.
        corpus: how input becomes documents.
        build: how documents become shards.
        overwrite: whether another data set in `out` makes way.
        language: code of the text's language, for the record; None: not said.
        license: that the text is under, for the record; None: not said.
    """

    inputs: tuple[str, ...]
    out: Path | None
    tokenizer: TokenizerChoice
    corpus: CorpusOptions = field(default_factory=CorpusOptions)
    build: BuildOptions = field(default_factory=lambda: BuildOptions(workers=available_cores()))
    overwrite: bool = False
    language: str | None = None
    license: str | None = None


def in_language(
    code: str | None, choice: TokenizerChoice, segmenter: SegmenterName | None, warn: Callable[[str], None]
) -> tuple[TokenizerChoice, SegmenterName, str | None]:
    """Tokenizer, segmenter and code of a language, with what was left open as the language asks.

    Args:
        code: of ISO 639-1; None: not said.
        warn: told where the language's segmenter is not installed.

    Raises:
        ConfigError: there is no such language.
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
    """What was made.

    Attributes:
        unchanged: the data set already existed with identical content.
        repaired: files of a data set that was there already, which were damaged or missing and have been made again.
    """

    folder: Path
    manifest: Manifest
    seconds: float
    unchanged: bool
    repaired: tuple[str, ...] = ()

    def values(self) -> dict[str, Any]:
        """The statistics flat, then what else is known: what `--json` prints."""
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
            "unchanged": self.unchanged,
            "repaired": list(self.repaired),
            "seconds": self.seconds,
            "tokens_per_second": statistics.tokens / self.seconds,
        }


@dataclass(frozen=True)
class CheckReport:
    """What `prepare` would find. `errors` would stop it, `problems` would not; `statistics` needs a tokenizer."""

    documents: int
    sentences: int
    characters: int
    bytes_read: int
    statistics: Statistics | None
    problems: tuple[Problem, ...]
    errors: tuple[str, ...]


def prepare(request: PrepareRequest, progress: Progress) -> PrepareReport:
    """Make the data set. It appears in `request.out` whole or not at all.

    Raises:
        ConfigError: the request contradicts itself, the segmenter is not installed, or `out` holds something else.
        DataError: the input or the tokenizer cannot be used, or `out` cannot be written.
    """
    began = time.monotonic()
    choice = request.tokenizer
    choice.check()
    if request.out is None:
        raise ConfigError("no output folder is given", hint="add --out DATA, or --check to look at the input only")
    check_folder("--out", request.out, *map(Path, request.inputs))
    check_not_inside("--out", request.out, choice.path)
    check_segmenter(request.build.segmenter)
    out = request.out.resolve()
    tokenizer = load_tokenizer(choice.path, choice.lowercase) if choice.path else None
    settings = configuration(choice, request.corpus, request.build, request.language, _one_line(request.license))
    before = standing(out, settings, request.overwrite)
    corpus = Corpus(request.inputs, request.corpus, exclude=out)
    problems = ProblemLog()
    with _saying_how_to_go_on(request.out, progress), staging(out) as folder:
        trained = None
        if tokenizer is None:
            trained = train_on(corpus, choice, request.build.seed, request.build.workers, progress)
            tokenizer = trained.tokenizer
        meter = Meter(progress, "tokenising", corpus)
        built = build(meter.read(problems), tokenizer, request.build, folder.path, meter)
        for line in problems.notes:
            progress.note(line)
        if not built.statistics.documents:
            found = "".join(f"; {problem}" for problem in problems.summary())
            raise DataError(f"the input holds no text{found}", hint="look at the input with: discern prepare INPUT --check")
        info = describe(tokenizer, trained)
        manifest = write_header(folder.path, tokenizer, info, built, request.inputs, settings, problems.summary())
        unchanged = before is not None and before.fingerprint == manifest.fingerprint
        if before is not None and not unchanged:
            raise another(request.out, "made of other text")
        repaired = repair(folder, before, manifest) if before is not None else ()
        if before is None:
            if request.overwrite and out.is_dir():
                refuse_foreign(out)  # put there meanwhile
            folder.publish(replace=request.overwrite)
    return PrepareReport(request.out, manifest, time.monotonic() - began, unchanged and not repaired, repaired)


def check(request: PrepareRequest, progress: Progress) -> CheckReport:
    """Read the input and tokenise it if a tokenizer is given, to see what `prepare` would say. Writes nothing.

    Raises:
        ConfigError, DataError: the tokenizer cannot be used, or an input does not exist. What is wrong inside the input
            is in the report, all of it.
    """
    choice = request.tokenizer
    if choice.path or choice.train:
        choice.check()
    check_segmenter(request.build.segmenter)
    tokenizer = load_tokenizer(choice.path, choice.lowercase) if choice.path else None
    corpus = Corpus(request.inputs, request.corpus, exclude=request.out)
    problems, errors = ProblemLog(), list[DiscernError]()
    meter = Meter(progress, "reading", corpus)
    documents = meter.read(problems, errors)
    statistics = None
    if tokenizer is not None:
        statistics = survey(documents, tokenizer, request.build, meter)
    else:
        for _ in documents:
            meter.show()
        meter.finish()
    for line in problems.notes:
        progress.note(line)
    totals = (meter.documents, meter.sentences, meter.characters, meter.bytes_read)
    return CheckReport(*totals, statistics, problems.summary(), tuple(map(str, errors)))


def warnings_of(manifest: Manifest) -> list[str]:
    """Warnings about a data set before training on it."""
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
            f"only {number} held out ({heldout.num_tokens:,} tokens), so held-out figures say more about that text than about "
            "the model: hold out more documents with a larger --heldout fraction, or with --documents line"
        )
    return found


def _one_line(license: str | None) -> str | None:
    """The license as cards show it.

    Raises:
        ConfigError: it is empty, or more than its name.
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
def _saying_how_to_go_on(out: Path, progress: Progress) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        progress.finish()
        progress.note(f"stopped before the end: {out} is as it was before. To prepare it, give the same command again.")
        raise
