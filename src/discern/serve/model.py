"""A model folder behind the API: everything it can do, loaded once, in float32; and why it cannot do the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, final, get_args

from discern.errors import ConfigError, DataError, MissingHeadError
from discern.inference.detection import Detector, chosen_threshold, detect_each, detection_values, load_detector
from discern.inference.filling import Filler, fill_masks, fill_values, load_filler
from discern.inference.model import Model, model_of
from discern.inference.scoring.scorers import CorpusScore, Score, TextScorer, load_scorer, values_of_scores
from discern.inference.texts import numbered
from discern.model_files.folder import TaskModel, open_model
from discern.progress import Silent
from discern.training.distributed import choose_device

Verb = Literal["detect", "fill", "score", "embed", "predict"]
VERBS: tuple[Verb, ...] = get_args(Verb)


def load_served(folder: Path, *, name: str | None = None, device: str = "auto", warn: Callable[[str], None]) -> ServedModel:
    """Load everything that a model can do.

    Args:
        folder: a run, an export, a fine-tuned model or a Hugging Face model.
        name: name to show; None: that of the folder.
        warn: called with messages about damaged checkpoints and assumptions.

    Raises:
        DataError: the folder holds no model.
        CheckpointError: weights are missing or damaged.
        ConfigError: there is no such device, or the model can do nothing at all.
    """
    model = ServedModel(folder, name or folder.resolve().name, str(choose_device(device)), warn)
    if len(model.lacks) == len(VERBS):
        lack = model.lacks["embed"]
        raise ConfigError(f"{folder} can do nothing that this server offers: {lack}", hint="give a run or an export")
    return model


@final
class ServedModel:
    """A model, ready to answer. Only verbs that it does not lack may be called.

    Attributes:
        lacks: for each verb that it cannot answer, the reason.
        threshold: probability from which a token is marked.
        tasks: for each task of a fine-tuned model its name, kind and labels, and what it reads: text, words or question.
    """

    def __init__(self, folder: Path, name: str, device: str, warn: Callable[[str], None]) -> None:
        self.name, self.lacks = name, dict[Verb, str]()
        opened = open_model(folder, warn=warn)  # what reads it shares its weights

        def loaded(verb: Verb, load: Callable[[], Any]) -> Any:
            try:
                return load()
            except (ConfigError, DataError, MissingHeadError) as error:
                self.lacks[verb] = error.message.replace(str(folder), name)
                return None

        self.detector: Detector = loaded("detect", lambda: load_detector(opened, warn, device))
        self.filler: Filler = loaded("fill", lambda: load_filler(opened, warn, device))
        self.scorer: TextScorer = loaded("score", lambda: load_scorer(opened, None, device, warn=warn))
        self.reader: Model = loaded("embed", lambda: model_of(opened, device))
        self.tasks: list[dict[str, Any]] = loaded("predict", lambda: _tasks((self.reader or opened).task_model())) or []
        self.threshold = None if "detect" in self.lacks else chosen_threshold(folder, self.detector, None, warn)[0]

    def described(self) -> dict[str, Any]:
        """What the model can do, for the page and `GET /models`."""
        return {
            "name": self.name,
            "can": [verb for verb in VERBS if verb not in self.lacks],
            "lacks": self.lacks,
            "threshold": self.threshold,
            "scorer": None if "score" in self.lacks else self.scorer.name,
            "tasks": self.tasks,
        }

    def detect(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        """For each text, what `discern detect --json` prints."""
        found = detect_each(self.detector, numbered(texts), Silent(), _ignore)
        return [detection_values(each, self.threshold or 0.0) for _, each in found]

    def fill(self, texts: Sequence[str], top: int) -> list[dict[str, Any]]:
        """For each text, what `discern fill --json` prints.

        Raises:
            ConfigError: a text has no mask.
        """
        return [fill_values(text, fill_masks(self.filler, text, top, _ignore)) for text in texts]

    def score_values(self, scores: Sequence[Score], *, tokens: bool) -> dict[str, Any]:
        """What `discern score --json` prints about the scores of some texts.

        Raises:
            ConfigError: a text has nothing to score.
        """
        for number, score in enumerate(scores, 1):
            if not score.tokens:
                raise ConfigError(f"text {number} has nothing to score", hint="give a text with at least one token")
        corpus = CorpusScore()
        corpus.add(scores)
        return corpus.values(self.scorer) | values_of_scores(scores, tokens=tokens)

    def embed(self, texts: Sequence[str], pooling: Literal["auto", "mean", "mean-all", "cls"]) -> list[list[float]]:
        """The vector of each text."""
        return self.reader.encode(texts, pooling).tolist()  # type: ignore[no-any-return]

    def predict(self, texts: Sequence[Any], task: str | None) -> list[dict[str, Any]]:
        """For each text, a line of `discern predict`.

        Raises:
            ConfigError: there is no such task, or a text is not what the task reads.
        """
        names = [each["name"] for each in self.tasks]
        if task not in names and (task or len(names) > 1):
            raise ConfigError(f"the task is {task}, expected one of: {', '.join(names)}", hint=f'"task": "{names[0]}"')
        return self.reader.predict(texts, task=task)


def _tasks(tuned: TaskModel) -> list[dict[str, Any]]:
    """The tasks that predict something, as in `ServedModel.tasks`."""
    labels = {name: tuned.task(name).labels for name in tuned.record["tasks"]}
    reads = {"tags": "words", "spans": "question"}
    tasks = [
        {"name": name, "kind": kind.kind, "labels": list(kind.names), "reads": reads.get(kind.kind, "text")}
        for name, kind in labels.items()
        if kind.kind != "vectors"
    ]
    if not tasks:
        raise DataError("it was trained for text embeddings, so it predicts no labels")
    return tasks


def _ignore(_: str) -> None:
    """A text that is read in windows needs no message: the page says it."""
