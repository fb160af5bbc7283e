"""A model folder behind the API: everything it can do, loaded once, in float32; and why it cannot do the rest."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, final

from discern.data.tokenizer.tokens import UnknownTokens, encode_texts
from discern.errors import ConfigError, DataError, MissingHeadError, did_you_mean
from discern.inference.detection import (
    ChosenThreshold,
    Detector,
    chosen_threshold,
    detect_replaced,
    detection_values,
    load_detector,
)
from discern.inference.fill import MASK, FilledToken, Filler, fill_masks, load_filler
from discern.inference.model import Model, model_of
from discern.inference.predict import examples_of, predictions_of
from discern.inference.scoring import CorpusScore, Score, TextScorer, load_scorer, token_values
from discern.model_files.folder import TaskModel, open_model
from discern.model_files.hub import local_model
from discern.progress import Silent
from discern.serve.requests import Pooling
from discern.training.distributed import choose_device

Verb = Literal["detect", "fill", "score", "embed", "predict"]
VERBS: tuple[Verb, ...] = ("detect", "fill", "score", "embed", "predict")
T = TypeVar("T")


@final
@dataclass(frozen=True)
class ServedModel:
    """A model, ready to answer. What it has no network for is None.

    Attributes:
        name: name to show.
        lacks: for each verb that it cannot answer, the reason.
    """

    name: str
    detector: Detector | None
    threshold: ChosenThreshold | None
    filler: Filler | None
    scorer: TextScorer | None
    reader: Model | None
    tuned: TaskModel | None
    lacks: Mapping[str, str] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """What the model can do, for the page and `GET /models`."""
        tasks: list[dict[str, Any]] = []
        for name in self.tuned.record["tasks"] if self.tuned is not None else ():
            labels = self.tuned.task(name).labels if self.tuned is not None else None
            if labels is not None and labels.kind != "vectors":
                reads = {"tags": "words", "spans": "question"}.get(labels.kind, "text")
                tasks.append({"name": name, "kind": labels.kind, "labels": list(labels.names), "reads": reads})
        return {
            "name": self.name,
            "can": [verb for verb in VERBS if verb not in self.lacks],
            "lacks": dict(self.lacks),
            "threshold": None if self.threshold is None else self.threshold.value,
            "scorer": None if self.scorer is None else self.scorer.name,
            "tasks": tasks,
        }

    def detect(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        """For each text, what `discern detect --json` prints."""
        detector, threshold = self._has("detect", self.detector), self._has("detect", self.threshold)
        encodings = encode_texts(detector.tokenizer, texts)
        found = detect_replaced(detector, texts, encodings, Silent().advance)
        return [detection_values(each, threshold.value) for each in found]

    def fill(self, texts: Sequence[str], top: int) -> list[dict[str, Any]]:
        """For each text, what `discern fill --json` prints.

        Raises:
            ConfigError: a text has no mask.
        """
        filler = self._has("fill", self.filler)
        return [{"text": text, "predictions": _predictions(fill_masks(filler, text, top, _ignore))} for text in texts]

    def alternatives(self, places: Sequence[tuple[str, int, int]], top: int) -> list[dict[str, Any]]:
        """The tokens that the generator predicts in place of a word, from the rest of the text.

        Args:
            places: a text, and the start and end of a word in it, in characters.

        Returns:
            For each place, `word` and `alternatives`: `text` and `probability`, without parts of words.
        """
        filler = self._has("fill", self.filler)
        return [self._alternatives(filler, *place, top) for place in places]

    def _alternatives(self, filler: Filler, text: str, start: int, end: int, top: int) -> dict[str, Any]:
        masked = f"{text[:start]}{MASK}{text[end:]}"
        # Some of the likeliest tokens continue a word, and are left out.
        found = fill_masks(filler, masked, 2 * top + 10, _ignore)[filler.masks_in(text[:start])]
        begins = filler.begins_words(text[:start])
        kept: dict[str, float] = {}
        for each in found:
            word = each.text.strip()
            continues = each.token.startswith("##") or (begins and each.text == word and word[:1].isalnum())
            if word and not continues and word not in kept:
                kept[word] = each.probability
        best = [{"text": word, "probability": value} for word, value in list(kept.items())[:top]]
        return {"word": text[start:end], "alternatives": best}

    def score(self, texts: Sequence[str]) -> list[Score]:
        """The score of each text."""
        return self._has("score", self.scorer).score(texts)

    def scores(self, found: Sequence[Score], *, tokens: bool) -> dict[str, Any]:
        """What `discern score --json` prints about the scores of some texts.

        Raises:
            ConfigError: a text has nothing to score.
        """
        scorer = self._has("score", self.scorer)
        empty = next((number for number, each in enumerate(found) if not each.tokens), None)
        if empty is not None:
            raise ConfigError(f"text {empty + 1} has nothing to score", hint="give a text with at least one token")
        together = CorpusScore()
        together.add(found)
        # JSON has no infinity.
        means = {name: None if value == math.inf else value for name, value in together.values(scorer).items()}
        return {
            **means,
            "scores": [each.total for each in found],
            "scores_per_token": [each.per_token for each in found],
            "scores_per_character": [each.per_character for each in found],
            **({"tokens": [token_values(each) for each in found]} if tokens else {}),
        }

    def embed(self, texts: Sequence[str], pooling: Pooling) -> list[list[float]]:
        """The vector of each text."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            vectors: list[list[float]] = self._has("embed", self.reader).encode(list(texts), pooling).tolist()
        return vectors

    def pooling(self, asked: Pooling) -> str:
        """How a text becomes a vector; for 'auto', as the model was trained."""
        return self._has("embed", self.reader).vectors.pooling if asked == "auto" else asked

    def predict(self, texts: Sequence[Any], task: str | None) -> list[dict[str, Any]]:
        """For each text, a line of `discern predict`.

        Raises:
            ConfigError: there is no such task, or a text is not what the task reads.
        """
        tuned = self._has("predict", self.tuned)
        tasks = tuned.objective.tasks
        # `TaskModel.task` says the same with the folder of the model and an option of the command line.
        if task is None and len(tasks) > 1:
            hint = f'name one of them: "task": "{next(iter(tasks))}"'
            raise ConfigError(f"{self.name} was fine-tuned on several tasks: {', '.join(tasks)}", hint=hint)
        if task is not None and task not in tasks:
            raise ConfigError(f"{self.name} was not fine-tuned on '{task}'", hint=did_you_mean(task, tasks))
        chosen = tuned.task(task)
        examples = examples_of(chosen, tuned.record["tasks"][chosen.name], texts)
        unknown = UnknownTokens(tuned.tokenizer)
        blocks = predictions_of(tuned, chosen, iter(examples), "float32", Silent(), unknown)
        return [{key: value for key, value in each.items() if key not in ("id", "logits")} for block in blocks for each in block]

    def _has(self, verb: Verb, part: T | None) -> T:
        """The part of the model that a verb needs.

        Raises:
            ConfigError: the model has none.
        """
        if part is None:
            raise ConfigError(self.lacks.get(verb, f"the model cannot {verb}"), hint="GET /models lists what each model can do")
        return part


def load_served(path: Path, *, name: str | None = None, device: str = "auto", warn: Callable[[str], None]) -> ServedModel:
    """Load everything that a model can do.

    Args:
        path: a run, an export, a fine-tuned model or a Hugging Face model, also by its name on the Hub.
        name: name to show; None: that of the folder.
        warn: called with messages about damaged checkpoints and assumptions.

    Raises:
        DataError: the folder holds no model.
        CheckpointError: weights are missing or damaged.
        ConfigError: there is no such device, or the model can do nothing at all.
    """
    place = str(choose_device(device))
    folder = local_model(path, Silent().note)
    opened = open_model(folder, warn=warn)  # what reads it shares its weights
    name = name or folder.resolve().name
    lacks: dict[str, str] = {}

    def tried(verb: Verb, part: Callable[[], T]) -> T | None:
        try:
            return part()
        except (ConfigError, DataError, MissingHeadError) as problem:
            lacks[verb] = problem.message.replace(str(folder), name)
            return None

    def tuned() -> TaskModel:
        found = opened.task_model() if reader is None else reader.task_model()
        if all(found.task(each).labels.kind == "vectors" for each in found.record["tasks"]):
            raise DataError("it was trained for text embeddings, so it predicts no labels")
        return found

    found = tried("detect", lambda: load_detector(opened, warn, place))
    filler = tried("fill", lambda: load_filler(opened, warn, place))
    scorer = tried("score", lambda: load_scorer(opened, None, place, warn=warn))
    reader = tried("embed", lambda: model_of(opened, place))
    model = ServedModel(
        name=name,
        detector=found,
        threshold=None if found is None else chosen_threshold(folder, found, None, warn),
        filler=filler,
        scorer=scorer,
        reader=reader,
        tuned=tried("predict", tuned),
        lacks=lacks,
    )
    if len(lacks) == len(VERBS):
        raise ConfigError(f"{path} can do nothing that this server offers: {lacks['embed']}", hint="give a run or an export")
    return model


def predicted(found: Sequence[dict[str, Any]], started: float) -> dict[str, Any]:
    """What `discern predict --json` prints.

    Args:
        started: `time.perf_counter()` when the request began.
    """
    seconds = time.perf_counter() - started
    rate = len(found) / max(seconds, 1e-9)
    return {"rows": len(found), "seconds": seconds, "rows_per_second": rate, "predictions": list(found)}


def _predictions(found: list[list[FilledToken]]) -> list[Any]:
    lists = [[{"token": each.token, "text": each.text, "probability": each.probability} for each in mask] for mask in found]
    return lists[0] if len(lists) == 1 else lists


def _ignore(_: str) -> None:
    """A text that is read in windows needs no message: the API says it in its documentation."""
