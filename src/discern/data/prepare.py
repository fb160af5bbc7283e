"""Prepare a data set: text through a tokenizer into shards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from discern.data.curation.contamination import EvaluationFiles, FileOverlap, OverlapSearch
from discern.data.curation.filters import all_left_out
from discern.data.dataset.build import BuildOptions, Built, build_shards
from discern.data.dataset.manifest import Manifest, Setting
from discern.data.dataset.publish import (
    configuration,
    describe,
    existing_data_set,
    other_data_set,
    refuse_foreign,
    repair,
    write_header,
)
from discern.data.dataset.remote import uploaded
from discern.data.executors import available_cores
from discern.data.languages import find_language
from discern.data.remote import remote_address, shown
from discern.data.reports import PartReport, PrepareReport
from discern.data.sources.corpus import Corpus, CorpusProgress
from discern.data.sources.documents import CorpusOptions
from discern.data.sources.problems import ProblemLog
from discern.data.stages.engines import Engine, EngineName, engine_of
from discern.data.stages.run import Work
from discern.data.tokenizer import fingerprint, load_tokenizer
from discern.data.tokenizer.choice import TokenizerChoice, TrainedTokenizer, train_on
from discern.data.tokenizer.words import SegmenterName
from discern.errors import ConfigError, DataError
from discern.progress import Progress
from discern.storage.output import OutputFolder, StagedFolder

_LONGEST_LICENSE = 200


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
    engine: EngineName = "local",
    progress: Progress,
) -> PrepareReport:
    """Make a data set from text. `out` is either complete or absent; it may be an address such as `s3://BUCKET/DATA`.

    With the engine `ray`, and to remove near-duplicates, the work is done in stages, whose results stay beside `out` until it
    is complete, so that the same call continues after an interruption. The data set does not depend on the engine.

    Args:
        inputs: files, folders, glob patterns, addresses (`https://`, `s3://`, `gs://`, `hf://`), `-` or `hf:NAME`.
        tokenizer: the tokenizer to use, or the kind to train.
        corpus: how the input becomes documents.
        build: how documents become shards.
        overwrite: replace another data set in `out`.
        language: code of the language of the text, for model cards.
        license: license of the text, for model cards.
        against: evaluation files to look for in the text; their overlap is recorded in the manifest, for model cards.
        engine: where the work runs: in processes on this machine, or on a Ray cluster.

    Raises:
        ConfigError: the arguments contradict each other, the segmenter or the engine is not installed, or `out` holds something
            else.
        DataError: the input, the tokenizer or an evaluation file cannot be used, or `out` cannot be written.
    """
    if (address := remote_address(out)) is not None:

        def make(folder: Path) -> PrepareReport:
            said = {"language": language, "license": license}
            shared = {"corpus": corpus, "build": build, "against": against, "engine": engine, "progress": progress}
            return prepare(inputs, out=folder, tokenizer=tokenizer, overwrite=overwrite, **said, **shared)  # type: ignore[arg-type]

        return uploaded(address, make, overwrite=overwrite, progress=progress)
    began = time.monotonic()
    asked = _Asked.of(inputs, out, tokenizer, corpus, build, language, license, overwrite=overwrite)
    in_stages = engine != "local" or asked.build.near_duplicates is not None
    if in_stages:
        _refuse_search(against)
    search = OverlapSearch(against) if against is not None else None
    with _advising_on_interruption(out, progress, goes_on=in_stages), OutputFolder(asked.target).staged() as folder:
        if in_stages:
            with engine_of(engine, asked.build.workers) as runs:
                work = asked.begin(None, progress, overwrite=overwrite)
                made = _in_stages(work, runs, folder.path, progress)
        else:
            work, made = None, _in_one_pass(asked, search, folder.path, progress)
        report = _publish(asked, made, folder, began, overwrite=overwrite, progress=progress)
    if work is not None:
        work.discard()
    return report


def prepare_part(
    inputs: Sequence[str],
    *,
    part: int,
    parts: int,
    out: Path,
    tokenizer: TokenizerChoice,
    corpus: CorpusOptions | None = None,
    build: BuildOptions | None = None,
    language: str | None = None,
    license: str | None = None,
    engine: EngineName = "local",
    progress: Progress,
) -> PartReport:
    """Prepare one share of a data set, for a batch scheduler that runs the shares; `merge` then makes the data set.

    Args:
        part: number of the share, from 0.
        parts: number of shares.

    Raises:
        ConfigError: as for `prepare`, or the other shares were started with different settings.
        DataError: as for `prepare`.
    """
    began = time.monotonic()
    asked = _Asked.of(inputs, out, tokenizer, corpus, build, language, license, overwrite=False)
    with _advising_on_interruption(out, progress, goes_on=True), engine_of(engine, asked.build.workers) as runs:
        work = asked.begin(parts, progress)
        done = work.run_share(runs, part, parts, progress)
    return PartReport(out, part, parts, len(done), len(work.plan.pieces), time.monotonic() - began)


def merge(out: Path, *, workers: int, overwrite: bool = False, engine: EngineName = "local", progress: Progress) -> PrepareReport:
    """Combine the shares that `prepare_part` prepared into a data set.

    Raises:
        ConfigError: no share has been prepared, or `out` holds something else.
        DataError: a share is missing or damaged, or `out` cannot be written.
    """
    began = time.monotonic()
    target = out.resolve()
    work = Work.begun(target)
    plan = work.plan
    before = existing_data_set(target, plan.settings, overwrite)
    asked = _Asked(plan.inputs, out, target, None, None, plan.corpus, plan.build, plan.settings, before)
    with _advising_on_interruption(out, progress, goes_on=True), OutputFolder(target).staged() as folder:
        with engine_of(engine, workers) as runs:
            made = _in_stages(work, runs, folder.path, progress)
        report = _publish(asked, made, folder, began, overwrite=overwrite, progress=progress)
    work.discard()
    return report


@dataclass(frozen=True)
class _Asked:
    """What was asked for, after the checks that need no work."""

    inputs: tuple[str, ...]
    out: Path
    target: Path
    choice: TokenizerChoice | None
    encoder: Tokenizer | None
    corpus: CorpusOptions
    build: BuildOptions
    settings: dict[str, Setting]
    before: Manifest | None

    @classmethod
    def of(
        cls,
        inputs: Sequence[str],
        out: Path,
        choice: TokenizerChoice,
        corpus: CorpusOptions | None,
        build: BuildOptions | None,
        language: str | None,
        license: str | None,
        *,
        overwrite: bool,
    ) -> _Asked:
        corpus, build = corpus or CorpusOptions(), build or BuildOptions(workers=available_cores())
        choice.check()
        build.check()
        OutputFolder(out).check(*map(Path, inputs))
        encoder = load_tokenizer(choice.path, choice.lowercase) if choice.path else None
        settings = configuration(choice, corpus, build, language, _one_line(license))
        target = out.resolve()
        before = existing_data_set(target, settings, overwrite)
        if before is not None and encoder is not None and fingerprint(encoder) != before.tokenizer.fingerprint:
            raise other_data_set(out, "made with another tokenizer")
        return cls(tuple(inputs), out, target, choice, encoder, corpus, build, settings, before)

    def text(self, progress: Progress) -> Corpus:
        """The documents of the inputs."""
        found = Corpus(self.inputs, self.corpus, exclude=self.target)
        if found.note is not None:
            progress.note(found.note)
        return found

    def begin(self, parts: int | None, progress: Progress, *, overwrite: bool = False) -> Work:
        """The work in stages; see `Work.begin`."""
        assert self.choice is not None
        return Work.begin(
            self.target,
            self.inputs,
            self.text(progress),
            self.encoder,
            self.choice,
            self.build,
            self.settings,
            parts,
            progress,
            overwrite=overwrite,
        )


@dataclass(frozen=True)
class _Made:
    """The shards that were made, and what the manifest says beside them."""

    built: Built
    tokenizer: Tokenizer
    trained: TrainedTokenizer | None
    problems: ProblemLog
    overlap: tuple[FileOverlap, ...] | None = None


def _in_one_pass(asked: _Asked, search: OverlapSearch | None, folder: Path, progress: Progress) -> _Made:
    """Read the text once, in this process, and tokenize it in others."""
    text, problems = asked.text(progress), ProblemLog()
    trained, encoder = None, asked.encoder
    if encoder is None:
        assert asked.choice is not None
        trained = train_on(text, asked.choice, asked.build.seed, asked.build.workers, progress, asked.build.filters)
        encoder = trained.tokenizer
    reading = CorpusProgress(progress, "tokenizing", text)
    built = build_shards(reading.read(problems), encoder, asked.build, folder, reading, search)
    overlap = search.results() if search is not None else None
    return _Made(built, encoder, trained, problems, overlap)


def _in_stages(work: Work, engine: Engine, folder: Path, progress: Progress) -> _Made:
    built, problems = work.run(engine, folder, progress)
    if not built.statistics.documents:
        work.discard()  # of no use to another command
    return _Made(built, work.tokenizer, work.trained, problems)


def _publish(
    asked: _Asked, made: _Made, folder: StagedFolder, began: float, *, overwrite: bool, progress: Progress
) -> PrepareReport:
    """Write the manifest and publish the data set, or repair one that is there."""
    problems = made.problems.summary()
    for line in made.problems.notes:
        progress.note(line)
    if not made.built.statistics.documents:
        if left_out := made.built.filtered:
            raise all_left_out(left_out)
        found = "".join(f"; {problem}" for problem in problems)
        raise DataError(f"the input contains no text{found}", hint="look at the input with: discern prepare INPUT --check")
    before, info = asked.before, describe(made.tokenizer, made.trained)
    # What is known of the same text is kept.
    overlap = made.overlap if made.overlap is not None else before.overlap if before is not None else None
    manifest = write_header(
        folder.path, made.tokenizer, info, made.built, tuple(map(shown, asked.inputs)), asked.settings, problems, overlap
    )
    unchanged = before is not None and before.fingerprint == manifest.fingerprint
    if before is not None and not unchanged:
        raise other_data_set(asked.out, "made from different text")
    repaired = repair(folder, before, manifest) if before is not None else ()
    if before is None:
        if overwrite and asked.target.is_dir():
            refuse_foreign(asked.target)  # put there meanwhile
        folder.publish(replace=overwrite)
    return PrepareReport(asked.out, manifest, time.monotonic() - began, unchanged and not repaired, repaired)


def _refuse_search(against: EvaluationFiles | None) -> None:
    if against is not None:
        raise ConfigError(
            "--against needs the whole text in one process",
            hint="look for evaluation files in a separate command: discern prepare INPUT --check --against FILE",
        )


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
def _advising_on_interruption(out: Path, progress: Progress, *, goes_on: bool = False) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        progress.finish()
        again = "continue from the finished tasks" if goes_on else "prepare it"
        error.args = (f"interrupted: {out} is unchanged. Run the same command again to {again}.",)
        progress.note(error.args[0])
        raise
