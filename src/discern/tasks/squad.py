"""SQuAD 1.1 and 2.0, the question sets of MRQA 2019, and CMRC 2018: what their answers are scored by, and their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

from discern.tasks.base import Definition, Prediction, Source, Task
from discern.tasks.examples import QuestionExample, Reading
from discern.tasks.metrics.answers import (
    SquadPrediction,
    cmrc_scores,
    common_piece_f1,
    mrqa_scores,
    squad1_scores,
    squad2_scores,
    word_f1_or_nothing,
)
from discern.tasks.metrics.scores import Scores
from discern.tasks.questions import Questions
from discern.tasks.readers.files import optional_split_file
from discern.tasks.readers.mrqa import MRQA_FILES, read_mrqa
from discern.tasks.readers.squad import read_squad


@final
class Squad1Questions(Questions):
    """Every question has an answer; scored as SQuAD 1.1."""

    family: ClassVar[str] = "squad1"

    def measure(self, examples: Sequence[QuestionExample], predictions: Sequence[Prediction]) -> Scores:
        return squad1_scores(examples, _texts(predictions))


@final
class Squad2Questions(Questions):
    """Some questions have no answer; scored as SQuAD 2.0, with the threshold of the settings and with the best one."""

    family: ClassVar[str] = "squad2"
    has_impossible: ClassVar[bool] = True

    def measure(self, examples: Sequence[QuestionExample], predictions: Sequence[Prediction]) -> Scores:
        said = {each["id"]: SquadPrediction(each["best_answer"], each["no_answer"]) for each in predictions}
        return squad2_scores(examples, said, self.settings.threshold)

    def overlap(self, said: str, gold: str) -> float:
        return word_f1_or_nothing(said, gold)


@final
class MrqaQuestions(Questions):
    """Every question has an answer; scored as MRQA 2019."""

    family: ClassVar[str] = "mrqa"

    def measure(self, examples: Sequence[QuestionExample], predictions: Sequence[Prediction]) -> Scores:
        return mrqa_scores(examples, _texts(predictions))


@final
class CmrcQuestions(Questions):
    """Every question has an answer; scored as CMRC 2018, by characters."""

    family: ClassVar[str] = "cmrc"

    def measure(self, examples: Sequence[QuestionExample], predictions: Sequence[Prediction]) -> Scores:
        return cmrc_scores(examples, _texts(predictions))

    def overlap(self, said: str, gold: str) -> float:
        return common_piece_f1(said, gold)


@dataclass(frozen=True)
class QuestionSource(Source[QuestionExample]):
    """The official files of one set.

    Attributes:
        reader: of its format.
        files: names of each split's file, the first that is there counts.
    """

    reader: Callable[..., Reading[QuestionExample]]
    files: Mapping[str, tuple[str, ...]]

    def splits(self, folder: Path) -> dict[str, Path]:
        found = {split: optional_split_file(folder, names) for split, names in self.files.items()}
        return {split: path for split, path in found.items() if path is not None}

    def read(self, path: Path, split: str, *, labelled: bool = True) -> Reading[QuestionExample]:
        return self.reader(path, keep_unfound=split != "train", labelled=labelled)


def _texts(predictions: Sequence[Prediction]) -> dict[str, str]:
    return {prediction["id"]: prediction["answer"] for prediction in predictions}


# The released code has these for every task whose name contains "qa" or "squad", and so misses naturalqs.
_DEFAULTS: dict[str, object] = {"task.sequence_length": 512, "finetune.epochs": 2.0}


def _squad(
    name: str, family: type[Task[QuestionExample]], files: Mapping[str, tuple[str, ...]], **further: object
) -> Definition[QuestionExample]:
    defaults = _DEFAULTS | {f"task.{key}": value for key, value in further.items()}
    return Definition(name, family, QuestionSource(read_squad, files), ("exact_match", "f1"), defaults=defaults)


def _squad_files(version: str) -> dict[str, tuple[str, ...]]:
    return {split: (f"{split}.json", f"{split}-{version}.json") for split in ("train", "dev", "test")}


def _mrqa(name: str, published: str) -> Definition[QuestionExample]:
    """A set of MRQA, as `train.jsonl` and `dev.jsonl` or by the names that it is published under."""
    files = {
        split: (*names, f"{split}/{published}.jsonl.gz", f"{split}/{published}.jsonl") for split, names in MRQA_FILES.items()
    }
    return Definition(name, MrqaQuestions, QuestionSource(read_mrqa, files), ("f1", "exact_match"), defaults=_DEFAULTS)


# The trial file, of 1,002 questions, is published beside the others: little to train on, but not nothing.
_CMRC_TRAIN = ("cmrc2018_train.json", "train.json", "cmrc2018_trial.json")
_CMRC_FILES = {"train": _CMRC_TRAIN, **{split: (f"cmrc2018_{split}.json", f"{split}.json") for split in ("dev", "test")}}

SQUAD1 = _squad("squad1", Squad1Questions, _squad_files("v1.1"))
SQUAD2 = _squad("squad2", Squad2Questions, _squad_files("v2.0"))
# A token is a character: 30 of them hold 94.5% of the dev set's answers, 50 hold 99%.
CMRC2018 = _squad("cmrc2018", CmrcQuestions, _CMRC_FILES, max_answer_length=50)
NEWSQA = _mrqa("newsqa", "NewsQA")
NATURALQS = _mrqa("naturalqs", "NaturalQuestionsShort")
TRIVIAQA = _mrqa("triviaqa", "TriviaQA-web")
SEARCHQA = _mrqa("searchqa", "SearchQA")
HOTPOTQA = _mrqa("hotpotqa", "HotpotQA")
SQUAD_MRQA = _mrqa("squad-mrqa", "SQuAD")
