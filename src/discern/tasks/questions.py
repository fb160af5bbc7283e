"""Extractive question answering: the answer to a question is a span of its context, or empty."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from discern.errors import DataError
from discern.models.config import ModelConfig
from discern.models.heads import PredictionLayers
from discern.tasks.answer_heads import JointHead, SpanHead
from discern.tasks.answer_spans import (
    ContextWindow,
    FoundAnswer,
    LocatedTokens,
    RowBudget,
    WindowOffsets,
    best_answers,
    cut_windows,
    located_tokens,
    no_answer_score,
    probabilities,
    row_budget,
)
from discern.tasks.base import Labels, Outputs, Prediction, Task, TaskConfig, TaskHead, TextEncoder
from discern.tasks.examples import QuestionExample, Reading
from discern.tasks.features import Column, Features, Ragged, TaskRows
from discern.tasks.metrics import Scores
from discern.tasks.metrics.answers import word_f1
from discern.wording import counted

if TYPE_CHECKING:
    from discern.tasks.baselines.base import Baseline

# Number of questions whose contexts are tokenized at a time; all formats keep the questions of a context together.
_BLOCK = 1000
_NAMES = ("answerable", "impossible")
# Characters of context shown on each side of a wrong answer.
_AROUND = 80


class QuestionConfig(TaskConfig):
    """Settings of question answering. The defaults are those of the released code, except for the head."""

    sequence_length: int = Field(
        384, ge=8, description="Tokens per row: question, window of the context, three special tokens. ELECTRA: 512."
    )
    head: Literal["joint", "span", "prediction"] = Field(
        "span",
        description="'span': one linear layer as in BERT, which Hugging Face can load. 'prediction': preceded by a layer of "
        "the same width, GELU and a LayerNorm, as in transformers' newer encoders, for which it is the default. 'joint': as in "
        "ELECTRA, used by --recipe paper and google; the end depends on the start, and separate layers predict whether there is "
        "an answer.",
    )
    max_query_length: int = Field(64, ge=1, description="Maximum number of tokens in a question, at most a third of the row.")
    doc_stride: int = Field(
        128,
        ge=1,
        description="Tokens between the starts of successive windows; fewer if windows would overlap by less than an answer.",
    )
    n_best: int = Field(20, ge=1, description="Number of answers kept per question.")
    beam_size: int = Field(
        20, ge=1, description="Number of starts considered per window, and of ends per start, in the search of the joint head."
    )
    max_answer_length: int = Field(30, ge=1, description="Maximum number of tokens of an answer.")
    answerable_weight: float = Field(
        0.5, ge=0, description="Weight of the loss for predicting whether there is an answer. Joint head only."
    )
    no_answer_threshold: float | None = Field(
        None,
        description="The answer is empty if `no_answer`, in logits, exceeds this threshold (default: -2.75 for the joint head, "
        "as in the released code, 0 for the others). The score with the best threshold is reported as well.",
    )

    @property
    def threshold(self) -> float:
        """`no_answer_threshold`, or its default for the head."""
        if self.no_answer_threshold is not None:
            return self.no_answer_threshold
        return -2.75 if self.head == "joint" else 0.0


class Questions(Task[QuestionExample]):
    """Start and end of the answer, predicted from `[CLS] question [SEP] window [SEP]`; long contexts make several windows.

    An answer is an unchanged piece of the context, with its case, accents and white space.
    A subclass defines the metrics.
    """

    Config: ClassVar[type[TaskConfig]] = QuestionConfig
    has_impossible: ClassVar[bool] = False
    """Whether a question may have no answer in its context."""

    @property
    def settings(self) -> QuestionConfig:
        """The configuration with its own type."""
        return cast(QuestionConfig, self.config)

    @classmethod
    def learn(cls, train: Reading[QuestionExample], config: TaskConfig, fixed: tuple[str, ...]) -> Labels:
        if not any(example.answers for example in train.examples):
            raise DataError(
                f"no question of {train.source} has an answer in its context: there is nothing to learn",
                hint="train on a file whose answers occur in their contexts exactly",
            )
        return Labels(_NAMES if cls.has_impossible else (), "spans")

    def check(self, reading: Reading[QuestionExample]) -> None:
        unknown = [example.id for example in reading.examples if example.impossible is None and not example.golds]
        if unknown:
            raise DataError(
                f"{reading.source}: question {unknown[0]} has no answers, and is not marked as impossible",
                hint='give every question "answers", or "is_impossible": true',
            )
        impossible = [example.id for example in reading.examples if _is_impossible(example)]
        if impossible and not self.has_impossible:
            raise DataError(
                f"{reading.source}: question {impossible[0]} has no answer ({len(impossible):,} in all); every question of "
                f"{self.name} has one",
                hint="in your own files, add such questions to the training file too; in SQuAD's format: --task squad2",
            )

    def encode(self, examples: Sequence[QuestionExample], text: TextEncoder, *, labeled: bool) -> Features:
        rows = _Rows(self.settings, text)
        for start in range(0, len(examples), _BLOCK):
            rows.add(examples[start : start + _BLOCK])
        return rows.features(labeled=labeled, impossible=self.has_impossible)

    def head(self, encoder: ModelConfig, dropout: float) -> TaskHead:
        settings, size = self.settings, encoder.hidden_size
        if settings.head == "prediction":
            return SpanHead(size, settings.n_best, PredictionLayers(encoder), dropout)
        # No dropout before the other heads, as in the released code and in BERT for question answering.
        if settings.head == "span":
            return SpanHead(size, settings.n_best)
        return JointHead(size, settings.beam_size, settings.answerable_weight if self.has_impossible else None)

    def items(self, rows: TaskRows) -> int:
        return len(rows.rows)

    def predict(self, examples: Sequence[QuestionExample], features: Features, outputs: Outputs) -> list[Prediction]:
        windows, settings = _windows(features), self.settings
        bounds = np.searchsorted(features.example, np.arange(len(examples) + 1)).tolist()
        predictions = []
        for example, begin, stop in zip(examples, bounds[:-1], bounds[1:], strict=True):
            outputs_of_windows = outputs[begin:stop]
            answers = best_answers(
                example.context,
                windows[begin:stop],
                outputs_of_windows,
                max_length=settings.max_answer_length,
                number=settings.n_best,
            )
            null_score = None
            if self.has_impossible:
                null_score = no_answer_score(
                    [float(each["null"]) for each in outputs_of_windows], answers, relative=settings.head != "joint"
                )
            predictions.append(self._prediction(example.id, answers, null_score))
        return predictions

    def _prediction(self, identity: str, answers: Sequence[FoundAnswer], null_score: float | None) -> Prediction:
        best = answers[0].text if answers else ""
        shares = probabilities(answers)
        prediction: Prediction = {"id": identity, "answer": best, "best_answer": best}
        if null_score is not None:
            prediction["no_answer"] = round(null_score, 6)
            prediction["answer"] = "" if prediction["no_answer"] > self.settings.threshold else best
        prediction["nbest"] = [
            {
                "text": answer.text,
                "start": answer.start,
                "start_score": round(answer.start_score, 6),
                "end_score": round(answer.end_score, 6),
                "score": round(answer.score, 6),
                "probability": round(share, 6),
            }
            for answer, share in zip(answers, shares, strict=True)
        ]
        return prediction

    def score(self, examples: Sequence[QuestionExample], predictions: Sequence[Prediction]) -> Scores:
        scores = self.measure(examples, predictions)
        return Scores({name: scores.values[name] for name in self.metrics} | scores.values, scores.degenerate)

    @abc.abstractmethod
    def measure(self, examples: Sequence[QuestionExample], predictions: Sequence[Prediction]) -> Scores:
        """The official metrics, in any order."""

    def overlap(self, answer: str, gold: str) -> float:
        """Overlap of an answer with a gold answer, 0-1; 1 also if both are empty."""
        return word_f1(answer, gold)

    def mistakes(self, examples: Sequence[QuestionExample], predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
        found = []
        for example, prediction in zip(examples, predictions, strict=True):
            golds = example.golds or ("",)
            badness = 1 - max(self.overlap(prediction["answer"], gold) for gold in golds)
            if badness > 0:
                shown = {name: value for name, value in prediction.items() if name != "nbest"}
                texts = {"text": example.question, "gold": list(dict.fromkeys(golds)), "context": _snippet(example, prediction)}
                found.append({**shown, **texts, "badness": round(badness, 6)})
        return sorted(found, key=lambda record: -record["badness"])

    def failure(self, examples: Sequence[QuestionExample], predictions: Sequence[Prediction]) -> str | None:
        answers = {prediction["answer"] for prediction in predictions}
        if len(predictions) < 2 or len(answers) > 1 or not self.mistakes(examples, predictions):
            return None
        answer = answers.pop()
        return f"every answer is '{answer}'" if answer else "every answer is empty"

    def baselines(self) -> Sequence[Baseline[QuestionExample]]:
        from discern.tasks.baselines.answers import answer_baselines

        return answer_baselines(threshold=self.settings.threshold, has_impossible=self.has_impossible)


class _Rows:
    """Collects the rows of questions, and counts truncations for the notes."""

    def __init__(self, settings: QuestionConfig, text: TextEncoder) -> None:
        self.settings = settings
        self.text = text
        self.ids: list[NDArray[Any]] = []
        self.types: list[NDArray[Any]] = []
        self.starts: list[NDArray[Any]] = []
        self.ends: list[NDArray[Any]] = []
        self.windows: list[tuple[int, int, int]] = []
        self.examples: list[int] = []
        self.targets: list[tuple[int, int, bool]] = []
        self.seen = 0
        self.counts: Counter[str] = Counter()

    def add(self, examples: Sequence[QuestionExample]) -> None:
        """Add the rows of some questions."""
        contexts = list(dict.fromkeys(example.context for example in examples))
        located = dict(zip(contexts, located_tokens(contexts, self.text), strict=True))
        for example, question in zip(examples, self.text.ids([example.question for example in examples]), strict=True):
            self._add(example, question, located[example.context])

    def _add(self, example: QuestionExample, question: Sequence[int], context: LocatedTokens) -> None:
        settings = self.settings
        shares = row_budget(
            len(question),
            settings.sequence_length,
            max_question=settings.max_query_length,
            stride=settings.doc_stride,
            max_answer=settings.max_answer_length,
        )
        windows = cut_windows(len(context.ids), shares.window, shares.stride)
        impossible = _is_impossible(example)
        # Of several answers the first is learned; the metric accepts any of them.
        answer = context.cover(example.answers[0]) if example.answers and not impossible else None
        whole = [self._add_window(question[: shares.question], context, window, answer, impossible) for window in windows]
        self.examples += [self.seen] * len(windows)
        self.seen += 1
        self._count(len(question), shares, len(windows))
        self.counts["lost"] += bool(example.answers) and not impossible and not any(whole)
        if answer is not None and (length := answer[1] - answer[0] + 1) > settings.max_answer_length:
            self.counts["long"] += 1
            self.counts["longest answer"] = max(self.counts["longest answer"], length)

    def _add_window(
        self,
        question: Sequence[int],
        context: LocatedTokens,
        window: ContextWindow,
        answer: tuple[int, int] | None,
        impossible: bool,
    ) -> bool:
        """Add one row, and return whether it contains the whole answer."""
        special, piece = self.text.special, slice(window.start, window.stop)
        head = np.array([special.cls, *question, special.sep], np.int32)
        first = len(head)
        self.ids.append(np.concatenate([head, context.ids[piece], np.array([special.sep], np.int32)]))
        self.types.append(np.repeat(np.array([0, 1], np.uint8), [first, window.stop - window.start + 1]))
        self.starts.append(context.starts[piece])
        self.ends.append(context.ends[piece])
        self.windows.append((first, window.best_start - window.start, window.best_stop - window.start))
        holds = answer is not None and window.start <= answer[0] and answer[1] < window.stop
        # A window without the answer has [CLS] as start and end, but counts as answerable if its question is. The released
        # code does the same, and takes the minimum over the windows of a question.
        begin, end = (first + place - window.start for place in answer) if answer is not None and holds else (0, 0)
        self.targets.append((begin, end, impossible))
        return holds

    def _count(self, question: int, shares: RowBudget, windows: int) -> None:
        self.counts["cut"] += question > shares.question
        self.counts["several"] += windows > 1
        if windows > 1 and shares.stride < self.settings.doc_stride:
            self.counts["strides"] += 1
            self.counts["stride"] = min(self.counts["stride"] or shares.stride, shares.stride)
        if question > shares.question:
            self.counts["longest"] = max(self.counts["longest"], shares.question)

    def _notes(self, *, labeled: bool) -> tuple[str, ...]:
        counts, settings = self.counts, self.settings
        total, several, cut = self.seen, counts["several"], counts["cut"]
        lines = {
            f"{several:,} of {total:,} contexts do not fit into a row: {len(self.ids):,} rows in total": several,
            f"{cut:,} of {total:,} questions were cut to {counts['longest']} tokens or fewer (task.max_query_length is "
            f"{settings.max_query_length}, and a question has at most a third of the row)": cut,
            f"rows of {settings.sequence_length} tokens are too short for a doc_stride of {settings.doc_stride}: the windows "
            f"of {counted(counts['strides'], 'context')} start closer together, up to every {counts['stride']} tokens. If the "
            f"model has the positions, longer rows are fewer: --set task.sequence_length={2 * settings.sequence_length}; "
            f"otherwise --set task.doc_stride={counts['stride']}": counts["strides"],
            f"{counts['lost']:,} of {total:,} answers do not fit into any window; longer rows may have room for them: --set "
            f"task.sequence_length={2 * settings.sequence_length}": counts["lost"] * labeled,
            f"{counts['long']:,} of {total:,} answers are longer than max_answer_length {settings.max_answer_length} and "
            f"cannot be predicted: --set task.max_answer_length={counts['longest answer']}": counts["long"] * labeled,
        }
        return tuple(line for line, count in lines.items() if count)

    def features(self, *, labeled: bool, impossible: bool) -> Features:
        """The features of all rows so far."""
        targets: dict[str, Column] = {}
        if labeled:
            table = np.array(self.targets, np.int64).reshape(-1, 3)
            targets = {"start": table[:, 0], "end": table[:, 1]}
            if impossible:
                targets["impossible"] = table[:, 2].astype(np.float32)
        places: dict[str, Column] = {
            "window": np.array(self.windows, np.int32).reshape(-1, 3),
            "starts": Ragged.of(self.starts),
            "ends": Ragged.of(self.ends),
        }
        numbers = np.array(self.examples, np.int64)
        ids, types = Ragged.of(self.ids), Ragged.of(self.types, np.uint8)
        return Features(ids, types, numbers, targets, places, self._notes(labeled=labeled))


def _windows(features: Features) -> list[WindowOffsets]:
    """The positions of the tokens of each row's window."""
    starts, ends = (cast(Ragged, features.places[name]) for name in ("starts", "ends"))
    table = cast(NDArray[np.int32], features.places["window"]).tolist()
    return [
        WindowOffsets(first, best_start, best_stop, starts[row], ends[row])
        for row, (first, best_start, best_stop) in enumerate(table)
    ]


def _is_impossible(example: QuestionExample) -> bool:
    """Whether a question has no answer, by the criterion of the official metric: it has no golds."""
    return bool(example.impossible) or not example.golds


def _snippet(example: QuestionExample, prediction: Prediction) -> str:
    """The context around the correct answer, or around the predicted one if there is none."""
    starts = [answer.start for answer in example.answers[:1]] or [answer["start"] for answer in prediction["nbest"][:1]]
    start = starts[0] if starts else 0
    begin, end = max(0, start - _AROUND), min(len(example.context), start + _AROUND)
    return ("..." if begin else "") + example.context[begin:end] + ("..." if end < len(example.context) else "")
