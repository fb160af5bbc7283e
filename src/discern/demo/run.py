"""The demonstration: collect text, prepare, pre-train, evaluate, detect wrong words, report and fine-tune, in five minutes."""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from discern.config.resolve import usual_vocabulary
from discern.data.dataset.shards import TokenData
from discern.data.prepare import prepare
from discern.data.tokenizer import load_tokenizer
from discern.data.tokenizer.choice import TokenizerChoice
from discern.demo.documentation import collect
from discern.finetuning.run import finetune
from discern.inference.detection import Detection, detect
from discern.inference.texts import Span, overlapping, words_of
from discern.objectives.metrics import area_under_curve
from discern.pretraining.evaluate import evaluate
from discern.pretraining.run import pretrain
from discern.progress import Progress, warning_to
from discern.report.run_page import report
from discern.storage.checksums import CHECKSUMS_NAME, read_lines, write_lines
from discern.storage.files import OutputFolder
from discern.training.process import require_single_process

VOCABULARY = usual_vocabulary("demo")
CHARACTERS = 8_000_000
# Sentences as in documentation, each with a word that does not belong: (text before, the word, text after).
SENTENCES = (
    ("Return the number of elements in the", "because", "."),
    ("This method should be called after the object is", "the", " and before it is used."),
    ("If the file does not", "an", ", an error is raised."),
    ("The default value", "and", " None, which means that all columns are used."),
    ("Returns a new list of", "list", " strings without changing the original."),
    ("The name of the", "from", " to read from the configuration."),
)
# Held-out sentences in which a random word is replaced: how many, and of how many words.
_RANDOM_SENTENCES, _SHORTEST, _LONGEST, _FEWEST_OCCURRENCES = 200, 8, 30, 5
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
# The labeled task: texts per kind, for training and for evaluation. Pre-training matters most with few labels.
OF_EACH_KIND = 200
FINETUNE_SETTINGS: tuple[str, ...] = ("finetune.epochs=5", "files.text=text", "files.label=kind", "task.sequence_length=32")
# Steps of the measured demonstration (docs/results), which finds wrong words; with half of them, the network has hardly begun to.
_MEASURED_STEPS = 1_644


def demo(out: Path, minutes: float, overrides: Sequence[str], progress: Progress) -> dict[str, Any]:
    """Run every stage that is not finished yet.

    Args:
        out: folder for text, data set, run and report; an interrupted demonstration in it is continued.
        minutes: maximum duration of the training.
        overrides: settings that override those of preset `demo`.

    Returns:
        The size of the text; the held-out metrics by name; `sentences`: the rank of the wrong word of each by suspicion;
        `wrong_words`: the same for random words in held-out sentences; `labeled_task`: scores with and without pre-training;
        `baseline`: a simple model on that task; `note`: a sentence if too few steps were trained, or None; `report`: path of the
        page; `seconds_by_stage`.

    Raises:
        ConfigError: it was started by torchrun with several processes.
        DataError: the folder holds something else.
    """
    require_single_process("the demonstration")
    run, data, warn = out / "run", out / "data", warning_to(progress)
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(stage: str) -> Iterator[None]:
        since = time.perf_counter()
        yield
        seconds[stage] = round(time.perf_counter() - since, 1)

    with timed("collect"):
        corpus, folder = out / "text.jsonl", OutputFolder(out)
        if not corpus.is_file():
            folder.refuse_others({corpus.name, CHECKSUMS_NAME}, "demonstration")
            folder.make(shared=True)
            progress.start("reading documentation", CHARACTERS, "characters")
            records = collect(CHARACTERS, progress.advance)
            progress.finish()
            write_lines(corpus, records)
        records = read_lines(corpus, hint=f"remove {corpus}, and the text is collected again")
    with timed("prepare"):
        if not data.exists():
            choice = TokenizerChoice(train="wordpiece", vocab_size=VOCABULARY, lowercase=True)
            prepare([str(corpus)], out=data, tokenizer=choice, progress=progress)
    with timed("pretrain"):
        hours = f"train.max_hours={minutes / 60:.6f}"
        pretrain(data=data, out=run, preset="demo", overrides=(hours, *overrides), progress=progress)
    with timed("evaluate"):
        metrics = evaluate(run, data=data, progress=progress, warn=warn)
    with timed("report"):
        fixed = [(f"{before} {word}{after}", (len(before) + 1, len(before) + 1 + len(word))) for before, word, after in SENTENCES]
        changed = _with_random_words(data)
        detections = detect(run, [sentence for sentence, _ in (*fixed, *changed)], progress, warn)
        shown, others = detections[: len(fixed)], detections[len(fixed) :]
        ranks, auc = _find(others, [span for _, span in changed])
        page = report(run, out / "report.html", shown)
    with timed("fine-tune"):
        task, baseline = _labeled_task(records, out, metrics["step"], progress)
    sentences = [
        {"text": detection.text, "wrong_word": word, "rank": rank, "words": len(words_of(detection.text))}
        for detection, rank, (_, word, _) in zip(shown, _find(shown, [span for _, span in fixed])[0], SENTENCES, strict=True)
    ]
    note = None
    if metrics["step"] < _MEASURED_STEPS / 2:
        longer = math.ceil(minutes * _MEASURED_STEPS / metrics["step"])
        note = (
            f"{metrics['step']:,} steps are too few for this network to learn much: the figures in the documentation are those "
            f"of {_MEASURED_STEPS:,}. On this machine, continue with --minutes {longer}."
        )
    return {
        "text": {
            "documents": len(records),
            "characters": sum(len(record["text"]) for record in records),
            "modules": len({record["module"] for record in records}),
            "packages": len({record["module"].partition("/")[0] for record in records}),
        },
        **metrics,
        "sentences": sentences,
        "wrong_words": {"sentences": len(ranks), "auc": auc, "most_suspicious": ranks.count(1)},
        "labeled_task": task,
        "baseline": baseline,
        "note": note,
        "report": str(page),
        "seconds_by_stage": seconds,
    }


def _with_random_words(data: Path) -> list[tuple[str, Span]]:
    """Held-out sentences with one of their words replaced at random, and its place. The choice is the same each time.

    All words that occur at least five times in the held-out text are equally likely.
    """
    sentences: list[tuple[str, list[Span]]] = []
    tokenizer, generator = load_tokenizer(data), random.Random(0)
    for shard in TokenData.open(data).split("heldout").shards:
        for start, stop in pairwise(shard.sentence_starts):
            for text in _SENTENCE_END.split(tokenizer.decode(shard.tokens[start:stop].tolist())):
                words = [(start, end) for start, end in words_of(text) if text[start:end].isalpha()]
                if _SHORTEST <= len(words) <= _LONGEST and "[UNK]" not in text:
                    sentences.append((text, words))
    frequent = Counter(text[start:end] for text, words in sentences for start, end in words)
    candidates = sorted(word for word, times in frequent.items() if times >= _FEWEST_OCCURRENCES)
    generator.shuffle(sentences)
    changed = []
    for text, words in sentences[:_RANDOM_SENTENCES]:
        start, end = generator.choice(words)
        word = generator.choice([word for word in candidates if word != text[start:end]])
        changed.append((text[:start] + word + text[end:], (start, start + len(word))))
    return changed


def _find(detections: Sequence[Detection], spans: Sequence[Span]) -> tuple[list[int], float]:
    """The rank of each wrong word among the words of its sentence by probability of *replaced*, from 1, and the AUC.

    The AUC is the chance that a wrong word looks more suspicious than another word of any sentence.
    """
    ranks: list[int] = []
    scores: list[float] = []
    is_wrong: list[bool] = []
    for detection, span in zip(detections, spans, strict=True):
        probabilities = [word.probability for word in detection.words]
        wrong = overlapping([(word.start, word.end) for word in detection.words], span)
        worst = max(probabilities[word] for word in wrong)
        ranks.append(1 + sum(probability > worst for probability in probabilities))
        scores += probabilities
        is_wrong += [word in wrong for word in range(len(probabilities))]
    return ranks, area_under_curve(np.array(scores, np.float32), np.array(is_wrong))


def _labeled_task(
    records: Sequence[Mapping[str, str]], out: Path, step: int, progress: Progress
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Does a documentation string describe a module, a class or a function? Three seeds each with and without pre-training.

    Args:
        records: the documents.
        out: folder of the demonstration, with its run.
        step: step of the run; after more training it is another model, which is fine-tuned in another folder.

    Returns:
        The benefit of pre-training, and the score of a baseline.
    """
    kinds: dict[str, list[str]] = {}
    for record in records:
        kinds.setdefault(record["kind"], []).append(record["text"].partition("\n")[0][:200])
    folder, settings = out / "task", list(FINETUNE_SETTINGS)
    folder.mkdir(exist_ok=True)
    size = min(OF_EACH_KIND, *(len(texts) // 2 for texts in kinds.values()))
    for texts in kinds.values():
        random.Random(0).shuffle(texts)
    for split, first in (("train", 0), ("dev", size)):
        path = folder / f"{split}.jsonl"
        write_lines(path, [{"text": text, "kind": kind} for kind in sorted(kinds) for text in kinds[kind][first : first + size]])
        settings.append(f"files.{split}={json.dumps(str(path), ensure_ascii=False)}")
    pretrained, untrained = (
        finetune(
            str(out / "run"),
            out=folder / name,
            overrides=settings,
            seeds=3,
            untrained=not baselines,
            baselines=baselines,
            progress=progress,
        )
        for name, baselines in ((f"pretrained-{step}", True), ("untrained", False))
    )
    task = {
        "examples": pretrained["train_examples"],
        "pretrained": pretrained["scores"],
        "untrained": untrained["scores"],
        "difference": pretrained["median"] - untrained["median"],
        "verdict": verdict(pretrained["scores"], untrained["scores"]),
    }
    return task, pretrained["baselines"]["tfidf"]


def verdict(pretrained: Sequence[float], untrained: Sequence[float]) -> str:
    """The conclusion about pre-training that the scores of the seeds allow."""
    if min(pretrained) > max(untrained):
        return "every pre-trained seed is above every untrained one"
    if max(pretrained) < min(untrained):
        return "every pre-trained seed is below every untrained one"
    return "no difference: the seeds of the two overlap"
