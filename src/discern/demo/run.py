"""The demonstration: collect text, prepare, pre-train, evaluate, detect wrong words, report and fine-tune, in five minutes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.config.layers import usual_vocabulary
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.demo.documentation import collect
from discern.demo.task import LabeledTask, labeled_task
from discern.demo.wrong_words import WrongWords, wrong_words
from discern.errors import DataError
from discern.inference.detection import Detection, detect
from discern.pretraining.evaluate import evaluate
from discern.pretraining.run import pretrain
from discern.progress import Progress
from discern.report.run_page import report
from discern.storage.checksums import Record, read_json
from discern.storage.files import whole_file, write_text
from discern.training.rank_environment import require_single_process

VOCABULARY = usual_vocabulary("demo")
# Sentences as in documentation, each with a word that does not belong: (text before, the word, text after).
SENTENCES = (
    ("Return the number of elements in the", "because", "."),
    ("This method should be called after the object is", "the", "and before it is used."),
    ("If the file does not", "an", ", an error is raised."),
    ("The default value", "and", "None, which means that all columns are used."),
    ("Returns a new list of", "list", "strings without changing the original."),
    ("The name of the", "from", "to read from the configuration."),
)


@dataclass(frozen=True)
class DetectedWord:
    """The discriminator's result for a sentence with a wrong word.

    Attributes:
        detection: probabilities of all tokens of the sentence.
        word: the wrong word.
        rank: rank of the wrong word among the tokens by probability of *replaced*, from 1.
    """

    detection: Detection
    word: str
    rank: int


@dataclass(frozen=True)
class DemoResult:
    """The results of a demonstration.

    Attributes:
        text: size of the text.
        metrics: held-out metrics.
        sentences: the sentences with a wrong word.
        wrong_words: results for random words in held-out sentences; None if there is no sentence of a usual length.
        report: HTML page.
        seconds: duration of each stage.
        task: results of the labeled task; None if there was too little text for it.
    """

    text: dict[str, int]
    metrics: dict[str, Any]
    sentences: list[DetectedWord]
    wrong_words: WrongWords | None
    report: Path
    seconds: dict[str, float]
    task: LabeledTask | None = None


def demo(
    *,
    out: Path,
    progress: Progress,
    warn: Callable[[str], None],
    minutes: float = 3.0,
    characters: int = 8_000_000,
    overrides: Sequence[str] = (),
    task_overrides: Sequence[str] = (),
) -> DemoResult:
    """Run every stage that is not finished yet.

    Args:
        out: folder for text, data set, run and report; an interrupted demonstration in it is continued.
        minutes: maximum duration of the training.
        characters: maximum amount of documentation.
        overrides: settings that override those of preset `demo`.
        task_overrides: settings of the labeled task.

    Raises:
        ConfigError: it was started by torchrun with several processes.
        DataError: the folder holds something else, or this Python has no documentation to read.
    """
    require_single_process("the demonstration")
    run = out / "run"
    seconds: dict[str, float] = {}
    stage = _Stopwatch(seconds)
    text = _collect(out, characters, progress)
    stage("collect")
    if not (out / "data").exists():
        choice = TokenizerChoice(train="wordpiece", vocab_size=VOCABULARY, lowercase=True)
        prepare([str(out / "text.jsonl")], out=out / "data", tokenizer=choice, progress=progress)
    stage("prepare")
    hours = f"train.max_hours={minutes / 60:.6f}"
    pretrain(data=out / "data", out=run, preset="demo", overrides=(hours, *overrides), progress=progress)
    stage("pretrain")
    metrics = evaluate(run, data=out / "data", progress=progress, warn=warn)
    stage("evaluate")
    found = detect(run, [" ".join(parts).replace(" .", ".").replace(" ,", ",") for parts in SENTENCES], progress, warn)
    sentences = [_rank(detection, before, word) for detection, (before, word, _) in zip(found, SENTENCES, strict=True)]
    random_words = wrong_words(run, out / "data", progress, warn)
    page = report(run, out / "report.html", found)
    stage("report")
    task = labeled_task(out, metrics["step"], progress, tuple(task_overrides))
    stage("fine-tune")
    return DemoResult(text, metrics, sentences, random_words, page, seconds, task)


class _Sizes(Record):
    documents: int
    characters: int
    modules: int
    packages: int


def _collect(out: Path, characters: int, progress: Progress) -> dict[str, int]:
    """Write the corpus, unless it exists; returns its size."""
    facts = out / "text.json"
    if facts.is_file():
        sizes = read_json(facts, _Sizes, hint=f"remove {facts} and text.jsonl, and the text is collected again")
        return {name: sizes[name] for name in _Sizes.model_fields}
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file, but the demonstration needs a folder", hint="choose another --out")
    if out.exists() and {path.name.removeprefix(".").removesuffix(".partial") for path in out.iterdir()} - {"text.jsonl"}:
        raise DataError(f"{out} is not empty and contains no demonstration", hint="choose another --out, or empty the folder")
    out.mkdir(parents=True, exist_ok=True)
    progress.start("reading documentation", characters, "characters")
    found = collect(characters, progress.advance)
    progress.finish()
    if not found.documents:
        raise DataError("this Python has no documentation strings to learn from", hint="prepare text of your own instead")
    with whole_file(out / "text.jsonl") as stream:
        stream.writelines(
            json.dumps({"text": document, "kind": kind}) + "\n"
            for document, kind in zip(found.documents, found.kinds, strict=True)
        )
    sizes = {
        "documents": len(found.documents),
        "characters": found.characters,
        "modules": found.modules,
        "packages": found.packages,
    }
    write_text(facts, json.dumps(sizes) + "\n")
    return sizes


def _rank(detection: Detection, before: str, word: str) -> DetectedWord:
    start = len(before) + 1
    inside = [at for at, (first, last) in enumerate(detection.offsets) if first < start + len(word) and last > start]
    worst = max(detection.replaced_probability[at] for at in inside)
    others = [p for at, p in enumerate(detection.replaced_probability) if at not in inside]
    return DetectedWord(detection, word, 1 + sum(probability > worst for probability in others))


class _Stopwatch:
    """Records the duration of each stage."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._since = time.perf_counter()

    def __call__(self, stage: str) -> None:
        now = time.perf_counter()
        self._seconds[stage] = round(now - self._since, 1)
        self._since = now
