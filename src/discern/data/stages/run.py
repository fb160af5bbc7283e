"""Runs the stages of a plan, or one share of the first stage, and joins the results."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from discern.data.dataset.build import BuildOptions, Built
from discern.data.dataset.manifest import Setting
from discern.data.dataset.publish import library_versions
from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import ProblemLog
from discern.data.stages import duplicates, shards
from discern.data.stages.engines import Engine
from discern.data.stages.plan import (
    PLAN_NAME,
    Plan,
    PrepareJob,
    differences,
    job_of_task,
    make_plan,
    read_plan,
    work_folder,
    write_plan,
)
from discern.data.stages.results import DONE_NAME, Stage, result_of, values_of
from discern.data.stages.tasks import Task
from discern.data.tokenizer.choice import TokenizerChoice, TrainedTokenizer, train_on
from discern.errors import ConfigError, DataError
from discern.progress import Progress
from discern.storage.files import cannot_write

_SHOWN = 8
_DESCRIPTIONS: dict[Stage, str] = {
    "pieces": "tokenizing",
    "buckets": "comparing documents",
    "clusters": "joining near-duplicates",
    "placed": "placing the documents",
    "shards": "writing the shards",
}


class Work(PrepareJob):
    """The tasks of a data set, and their results beside it."""

    @classmethod
    def begin(
        cls,
        target: Path,
        inputs: Sequence[str],
        text: Corpus,
        tokenizer: Tokenizer | None,
        choice: TokenizerChoice,
        build: BuildOptions,
        settings: dict[str, Setting],
        parts: int | None,
        progress: Progress,
        *,
        overwrite: bool = False,
    ) -> Work:
        """Begin a data set, or continue what an earlier command began.

        Args:
            target: folder of the data set.
            tokenizer: the tokenizer; None to train one, unless that was done before.
            parts: number of shares; None if this command runs all of them.
            overwrite: discard what a command with other settings or another version has left.

        Raises:
            ConfigError: another command has begun the same data set with other settings or other input, or the input cannot
                be read twice.
            DataError: there is no text to train a tokenizer on, or the folder cannot be written.
        """
        _refuse_pipes(text)
        folder = work_folder(target)
        before, stale = _earlier(folder, overwrite=overwrite)

        def planned(earlier: Plan | None) -> tuple[Plan, Tokenizer]:
            """The plan and its tokenizer, which is that of earlier work if it was trained for it."""
            if tokenizer is not None:
                return make_plan(inputs, text, tokenizer, None, build, settings, parts), tokenizer
            trained = _trained_before(folder, earlier) or train_on(
                text, choice, build.seed, build.workers, progress, build.filters
            )
            counts = trained.sentences, trained.characters
            return make_plan(inputs, text, trained.tokenizer, counts, build, settings, parts), trained.tokenizer

        plan, used = planned(before)
        if before is not None and before.fingerprint != plan.fingerprint:
            if not overwrite:
                raise _other_work(folder, before, plan)
            # The tokenizer of the other work may have been trained on other text, or in another way.
            plan, used = planned(None)
            before, stale = None, True
        if before is None:
            try:
                if stale:
                    _remove(folder)
                write_plan(folder, plan, used)
            except OSError as problem:
                raise cannot_write(folder, problem) from problem
        return cls(folder, plan, used)

    @classmethod
    def begun(cls, target: Path) -> Work:
        """The work whose parts are to be merged.

        Raises:
            ConfigError: no part has been prepared.
            DataError: a part is missing.
        """
        folder = work_folder(target)
        plan = read_plan(folder)
        if plan is None or plan.parts is None:
            raise ConfigError(
                f"there are no parts of {target} to merge", hint="prepare them first: discern prepare INPUT --out DATA --part 0/2"
            )
        tokenizer = job_of_task(str(folder), plan.fingerprint).tokenizer
        results = [result_of(folder, "pieces", index) for index in range(len(plan.pieces))]
        missing = [index for index, result in enumerate(results) if not (result / DONE_NAME).is_file()]
        if missing:
            of = plan.parts
            parts = sorted({index % of for index in missing})
            names = ", ".join(f"{part}/{of}" for part in parts[:_SHOWN]) + (", ..." if len(parts) > _SHOWN else "")
            raise DataError(
                f"{len(missing):,} of {len(plan.pieces):,} pieces of {target} are missing, from parts {names}",
                hint=f"prepare them with the same command as the other parts, and --part {parts[0]}/{of}",
            )
        return cls(folder, plan, tokenizer)

    @property
    def trained(self) -> TrainedTokenizer | None:
        """The tokenizer, if it was trained on the input."""
        return TrainedTokenizer(self.tokenizer, *self.plan.trained_on) if self.plan.trained_on else None

    def run_share(self, engine: Engine, part: int, parts: int, progress: Progress) -> list[int]:
        """Run one share of the first stage; returns its pieces."""
        pieces = self.plan.share(part, parts)
        self._run(engine, [("pieces", index) for index in pieces], progress)
        return pieces

    def run(self, engine: Engine, folder: Path, progress: Progress) -> tuple[Built, ProblemLog]:
        """Run every stage, without what is finished, and put the shards into a folder; returns what was built and noticed.

        Raises:
            DataError: the input cannot be read, a result cannot be written, or a machine does not see the folder.
        """
        self._run(engine, [("pieces", index) for index in range(len(self.plan.pieces))], progress)
        if self.plan.build.near_duplicates is not None:
            buckets = duplicates.num_buckets(self)
            self._run(engine, [("buckets", index) for index in range(buckets)], progress)
            self._run(engine, [("clusters", 0)], progress)
        self._run(engine, [("placed", 0)], progress)
        count = len(values_of(result_of(self.folder, "placed"))["shards"])
        self._run(engine, [("shards", index) for index in range(count)], progress)
        built = shards.join(self, folder)
        if self.plan.build.near_duplicates is not None:
            built = replace(built, near_duplicates=duplicates.summary(self.folder, self.plan.build.near_duplicates))
        return built, shards.joined_problems(self)

    def discard(self) -> None:
        """Remove the results of the tasks, after the data set was published."""
        with suppress(OSError):
            _remove(self.folder)

    def _run(self, engine: Engine, tasks: list[Task], progress: Progress) -> None:
        if not tasks:
            return
        progress.start(_DESCRIPTIONS[tasks[0][0]], len(tasks), "tasks")
        for _ in engine.run(self.folder, self.plan.fingerprint, tasks):
            progress.advance(1)
        progress.finish()


def _earlier(folder: Path, *, overwrite: bool) -> tuple[Plan | None, bool]:
    """The plan of an earlier command that this one may go on with, and whether there is another one to be replaced.

    Raises:
        ConfigError, DataError: there is one that is damaged or of another version, and it is not to be replaced.
    """
    try:
        before = read_plan(folder)
    except DataError:
        if not overwrite:
            raise
        return None, True
    if before is None or before.versions == library_versions(before.build.filters):
        return before, False
    if not overwrite:
        raise _other_work(folder, before, replace(before, versions=library_versions(before.build.filters)))
    return None, True


def _other_work(folder: Path, before: Plan, now: Plan) -> ConfigError:
    """The error of unfinished work that is not that of this command."""
    what, again = "; ".join(differences(before, now)), f"rm -r '{folder}'"
    if replace(before, pieces=now.pieces) == now:
        return ConfigError(f"{folder} holds unfinished work on different input ({what})", hint=f"to start over: {again}")
    return ConfigError(
        f"{folder} holds unfinished work of a different command ({what})",
        hint=f"run that command to continue it, or start over: {again}",
    )


def _remove(folder: Path) -> None:
    """Remove a plan and its results.

    Raises:
        OSError: something cannot be removed.
    """
    # The results first: without their plan, another one would take them for its own after an interruption.
    for path in list(folder.iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
    (folder / PLAN_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _trained_before(folder: Path, before: Plan | None) -> TrainedTokenizer | None:
    """The tokenizer that an earlier command trained for the same work."""
    if before is None or before.trained_on is None:
        return None
    return TrainedTokenizer(job_of_task(str(folder), before.fingerprint).tokenizer, *before.trained_on)


def _refuse_pipes(text: Corpus) -> None:
    if not text.rereadable:
        raise ConfigError(
            "standard input and pipes cannot be read in pieces, which --near-duplicates, --engine ray and --part need",
            hint="save the text to a file first",
        )
