"""The whole way in five minutes: text found on this machine, data set, pre-training, figures, words that look wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.artifacts.files import whole_file, write_text
from discern.config.presets import usual_vocabulary
from discern.data.documentation import collect
from discern.data.tokenizer_choice import TokenizerChoice
from discern.errors import DataError
from discern.progress import Progress
from discern.records import Record, read_record
from discern.scoring.detection import Detection
from discern.training.place import refuse_ranks
from discern.workflows.demo_task import LabelledTask, labelled_task
from discern.workflows.detect import detect
from discern.workflows.evaluate import EvaluateRequest, evaluate
from discern.workflows.prepare import PrepareRequest, prepare
from discern.workflows.pretrain import PretrainRequest, pretrain
from discern.workflows.report import report

VOCABULARY = usual_vocabulary("demo")
# Sentences of the kind that documentation is made of, with a word put in that does not belong: (before, word, after).
SENTENCES = (
    ("Return the number of elements in the", "because", "."),
    ("This method should be called after the object is", "the", "and before it is used."),
    ("If the file does not", "an", ", an error is raised."),
    ("The default value", "and", "None, which means that all columns are used."),
    ("Returns a new list of", "list", "strings without changing the original."),
    ("The name of the", "from", "to read from the configuration."),
)


@dataclass(frozen=True)
class DemoRequest:
    """How large the demonstration is.

    Attributes:
        out: folder that gets text, data set, run and report; an interrupted demonstration there goes on.
        minutes: of training, at most.
        characters: of documentation, at most.
        overrides: settings over those of preset `demo`.
        task_overrides: settings of the labelled task.
    """

    out: Path
    minutes: float = 3.0
    characters: int = 8_000_000
    overrides: tuple[str, ...] = ()
    task_overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """What the discriminator said of one sentence with a wrong word.

    Attributes:
        detection: probabilities of all its tokens.
        word: the wrong one.
        rank: place of the wrong word when the tokens are sorted from the most to the least suspicious, from 1.
    """

    detection: Detection
    word: str
    rank: int


@dataclass(frozen=True)
class DemoResult:
    """What came out: the text's size, held-out figures, sentences, the report, seconds by stage, and the labelled task."""

    text: dict[str, int]
    figures: dict[str, Any]
    sentences: list[Found]
    report: Path
    seconds: dict[str, float]
    task: LabelledTask | None = None


def demo(request: DemoRequest, progress: Progress, warn: Callable[[str], None]) -> DemoResult:
    """Run every stage that is not done yet.

    Raises:
        ConfigError: torchrun started it several times.
        DataError: the folder holds something else, or this Python has no documentation to read.
    """
    refuse_ranks("the demonstration")
    out, run = request.out, request.out / "run"
    seconds: dict[str, float] = {}
    stage = _Stopwatch(seconds)
    text = _collect(request, progress)
    stage("collect")
    if not (out / "data").exists():
        choice = TokenizerChoice(train="wordpiece", vocab_size=VOCABULARY, lowercase=True)
        prepare(PrepareRequest((str(out / "text.jsonl"),), out / "data", choice), progress)
    stage("prepare")
    hours = f"train.max_hours={request.minutes / 60:.6f}"
    pretrain(PretrainRequest(out / "data", run, preset="demo", overrides=(hours, *request.overrides)), progress)
    stage("pretrain")
    figures = evaluate(EvaluateRequest(run, out / "data"), progress, warn)
    stage("evaluate")
    found = detect(run, [" ".join(parts).replace(" .", ".").replace(" ,", ",") for parts in SENTENCES], progress, warn)
    sentences = [_rank(detection, before, word) for detection, (before, word, _) in zip(found, SENTENCES, strict=True)]
    page = report(run, out / "report.html", found)
    stage("report")
    task = labelled_task(out, figures["step"], progress, request.task_overrides)
    stage("fine-tune")
    return DemoResult(text, figures, sentences, page, seconds, task)


class _Sizes(Record):
    documents: int
    characters: int
    modules: int
    packages: int


def _collect(request: DemoRequest, progress: Progress) -> dict[str, int]:
    """Write the corpus, unless it is there; gives its size."""
    out, facts = request.out, request.out / "text.json"
    if facts.is_file():
        sizes = read_record(facts, _Sizes, hint=f"remove {facts} and text.jsonl: the text is collected again")
        return {name: sizes[name] for name in _Sizes.model_fields}
    if out.exists() and {path.name.removeprefix(".").removesuffix(".partial") for path in out.iterdir()} - {"text.jsonl"}:
        raise DataError(f"{out} is not empty and holds no demonstration", hint="choose another --out, or empty the folder")
    out.mkdir(parents=True, exist_ok=True)
    progress.start("reading documentation", request.characters, "characters")
    found = collect(request.characters, progress.advance)
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


def _rank(detection: Detection, before: str, word: str) -> Found:
    start = len(before) + 1
    inside = [at for at, (first, last) in enumerate(detection.offsets) if first < start + len(word) and last > start]
    worst = max(detection.replaced_probability[at] for at in inside)
    others = [p for at, p in enumerate(detection.replaced_probability) if at not in inside]
    return Found(detection, word, 1 + sum(probability > worst for probability in others))


class _Stopwatch:
    """Notes how long each stage took."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._since = time.perf_counter()

    def __call__(self, stage: str) -> None:
        now = time.perf_counter()
        self._seconds[stage] = round(now - self._since, 1)
        self._since = now
