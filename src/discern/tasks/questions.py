"""Questions answered by a piece of their context, or by nothing."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from discern.errors import DataError
from discern.tasks.answer_decoding import FoundAnswer, WindowPlaces, best_answers, no_answer_odds, probabilities
from discern.tasks.answer_heads import JointHead, SpanHead
from discern.tasks.base import Labels, Outputs, Prediction, Task, TaskConfig, TaskHead, TextEncoder
from discern.tasks.examples import QuestionExample, Reading
from discern.tasks.features import Column, Features, Ragged, TaskRows
from discern.tasks.metrics.answers import word_f1
from discern.tasks.metrics.scores import Scores
from discern.tasks.windows import LocatedTokens, RowShares, Window, cut_windows, located_tokens, row_shares

if TYPE_CHECKING:
    from discern.tasks.baselines.base import Baseline

# Contexts are tokenised this many questions at a time; those of one context stand together in all formats.
_BLOCK = 1000
_NAMES = ("answerable", "impossible")
# Characters of the context that a mistake is shown with, on each side of the answer.
_AROUND = 80


class QuestionConfig(TaskConfig):
    """Settings of question answering. Defaults are those of the released code, but for the head."""

    sequence_length: int = Field(
        384, ge=8, description="Positions of a row: question, window of the context, three special tokens. ELECTRA: 512."
    )
    head: Literal["joint", "span"] = Field(
        "span",
        description="'span': that of BERT, one linear layer, which Hugging Face can load. 'joint': that of ELECTRA, used by "
        "--recipe paper and google; the end depends on the start, and separate layers predict whether there is an answer.",
    )
    max_query_length: int = Field(64, ge=1, description="Tokens that a question keeps; a third of the row at most.")
    doc_stride: int = Field(
        128, ge=1, description="Tokens from one window to the next; fewer where windows would overlap by less than an answer."
    )
    n_best: int = Field(20, ge=1, description="Answers kept for each question.")
    beam_size: int = Field(20, ge=1, description="Starts that the joint head looks at in each window, and ends of each start.")
    max_answer_length: int = Field(30, ge=1, description="Tokens of an answer.")
    answerable_weight: float = Field(0.5, ge=0, description="Of the loss of whether there is an answer. Joint head only.")
    no_answer_threshold: float | None = Field(
        None,
        description="Nothing is answered where `no_answer` exceeds it. Logits; None: -2.75 for the joint head, as in the "
        "released code, 0 for spans. The score with the best threshold is reported beside.",
    )

    @property
    def threshold(self) -> float:
        """`no_answer_threshold`, or what stands for None."""
        if self.no_answer_threshold is not None:
            return self.no_answer_threshold
        return -2.75 if self.head == "joint" else 0.0


class Questions(Task[QuestionExample]):
    """Where the answer begins and ends, read from `[CLS] question [SEP] window [SEP]`; long contexts give several windows.

    An answer is cut from the context as it stands in the file, so its case, accents and white space are kept.
    A subclass says what its answers are scored by.
    """

    Config: ClassVar[type[TaskConfig]] = QuestionConfig
    has_impossible: ClassVar[bool] = False
    """Whether a context may hold no answer to its question."""

    @property
    def settings(self) -> QuestionConfig:
        """The configuration, of its own type."""
        return cast(QuestionConfig, self.config)

    @classmethod
    def learn(cls, train: Reading[QuestionExample], config: TaskConfig, fixed: tuple[str, ...]) -> Labels:
        if not any(example.answers for example in train.examples):
            raise DataError(
                f"no question of {train.source} has an answer in its context: there is nothing to learn",
                hint="train on a file with answers; each must occur in its context to the letter",
            )
        return Labels(_NAMES if cls.has_impossible else (), "spans")

    def check(self, reading: Reading[QuestionExample]) -> None:
        unknown = [example.id for example in reading.examples if example.impossible is None and not example.golds]
        if unknown:
            raise DataError(
                f"{reading.source}: question {unknown[0]} has no answers, and does not say that there are none",
                hint='give every question "answers", or "is_impossible": true',
            )
        impossible = [example.id for example in reading.examples if _is_impossible(example)]
        if impossible and not self.has_impossible:
            raise DataError(
                f"{reading.source}: {len(impossible):,} questions have no answer, the first is {impossible[0]}; every question "
                f"of {self.name} has one",
                hint="in a file of your own, put such questions into the training file too; in SQuAD's format: --task squad2",
            )

    def encode(self, examples: Sequence[QuestionExample], text: TextEncoder, *, labelled: bool) -> Features:
        rows = _Rows(self.settings, text)
        for start in range(0, len(examples), _BLOCK):
            rows.add(examples[start : start + _BLOCK])
        return rows.features(labelled=labelled, impossible=self.has_impossible)

    def head(self, hidden_size: int, dropout: float) -> TaskHead:
        # No dropout before either head: as in the released code, and in BERT's for questions.
        settings = self.settings
        if settings.head == "span":
            return SpanHead(hidden_size, settings.n_best)
        return JointHead(hidden_size, settings.beam_size, settings.answerable_weight if self.has_impossible else None)

    def items(self, rows: TaskRows) -> int:
        return len(rows.rows)

    def predict(self, examples: Sequence[QuestionExample], features: Features, outputs: Outputs) -> list[Prediction]:
        windows, settings = _windows(features), self.settings
        bounds = np.searchsorted(features.example, np.arange(len(examples) + 1)).tolist()
        predictions = []
        for example, begin, stop in zip(examples, bounds[:-1], bounds[1:], strict=True):
            said = outputs[begin:stop]
            answers = best_answers(
                example.context, windows[begin:stop], said, max_length=settings.max_answer_length, number=settings.n_best
            )
            odds = None
            if self.has_impossible:
                odds = no_answer_odds([float(each["null"]) for each in said], answers, relative=settings.head == "span")
            predictions.append(self._prediction(example.id, answers, odds))
        return predictions

    def _prediction(self, identity: str, answers: Sequence[FoundAnswer], odds: float | None) -> Prediction:
        best = answers[0].text if answers else ""
        shares = probabilities(answers)
        said: Prediction = {"id": identity, "answer": best, "best_answer": best}
        if odds is not None:
            said["no_answer"] = round(odds, 6)
            said["answer"] = "" if said["no_answer"] > self.settings.threshold else best
        said["nbest"] = [
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
        return said

    def score(self, examples: Sequence[QuestionExample], predictions: Sequence[Prediction]) -> Scores:
        scores = self.measure(examples, predictions)
        return Scores({name: scores.values[name] for name in self.metrics} | scores.values, scores.degenerate)

    @abc.abstractmethod
    def measure(self, examples: Sequence[QuestionExample], predictions: Sequence[Prediction]) -> Scores:
        """The official metrics, in any order."""

    def overlap(self, said: str, gold: str) -> float:
        """How much of an answer is right, 0-1; 1 also where both are empty."""
        return word_f1(said, gold)

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

    def failure(self, predictions: Sequence[Prediction]) -> str | None:
        said = {prediction["answer"] for prediction in predictions}
        if len(predictions) < 2 or len(said) > 1:
            return None
        answer = said.pop()
        return f"every answer is '{answer}'" if answer else "every answer is empty"

    def baselines(self) -> Sequence[Baseline[QuestionExample]]:
        from discern.tasks.baselines.answers import answer_baselines

        return answer_baselines(threshold=self.settings.threshold, has_impossible=self.has_impossible)


class _Rows:
    """Gathers the rows of questions, and counts what happened to them."""

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
        """The rows of some more questions."""
        contexts = list(dict.fromkeys(example.context for example in examples))
        located = dict(zip(contexts, located_tokens(contexts, self.text), strict=True))
        for example, question in zip(examples, self.text.ids([example.question for example in examples]), strict=True):
            self._add(example, question, located[example.context])

    def _add(self, example: QuestionExample, question: Sequence[int], context: LocatedTokens) -> None:
        settings = self.settings
        shares = row_shares(
            len(question),
            settings.sequence_length,
            max_question=settings.max_query_length,
            stride=settings.doc_stride,
            max_answer=settings.max_answer_length,
        )
        windows = cut_windows(len(context.ids), shares.window, shares.stride)
        impossible = _is_impossible(example)
        # Of several answers the first: annotators differ, and one of them is what the others are measured against.
        answer = context.cover(example.answers[0]) if example.answers and not impossible else None
        whole = [self._add_window(question[: shares.question], context, window, answer, impossible) for window in windows]
        self.examples += [self.seen] * len(windows)
        self.seen += 1
        self._count(len(question), shares, len(windows))
        self.counts["lost"] += bool(example.answers) and not impossible and not any(whole)
        self.counts["long"] += answer is not None and answer[1] - answer[0] >= settings.max_answer_length

    def _add_window(
        self, question: Sequence[int], context: LocatedTokens, window: Window, answer: tuple[int, int] | None, impossible: bool
    ) -> bool:
        """One row; gives whether it holds the whole answer."""
        special, piece = self.text.special, slice(window.start, window.stop)
        head = np.array([special.cls, *question, special.sep], np.int32)
        first = len(head)
        self.ids.append(np.concatenate([head, context.ids[piece], np.array([special.sep], np.int32)]))
        self.types.append(np.repeat(np.array([0, 1], np.uint8), [first, window.stop - window.start + 1]))
        self.starts.append(context.starts[piece])
        self.ends.append(context.ends[piece])
        self.windows.append((first, window.best_start - window.start, window.best_stop - window.start))
        holds = answer is not None and window.start <= answer[0] and answer[1] < window.stop
        # A window that does not hold the answer has [CLS] as start and end. It counts as answerable all the same if its
        # question is: so the released code has it, where what counts is the least of all windows.
        begin, end = (first + place - window.start for place in answer) if answer is not None and holds else (0, 0)
        self.targets.append((begin, end, impossible))
        return holds

    def _count(self, question: int, shares: RowShares, windows: int) -> None:
        self.counts["cut"] += question > shares.question
        self.counts["several"] += windows > 1
        self.counts["strides"] += windows > 1 and shares.stride < self.settings.doc_stride
        if question > shares.question:
            self.counts["longest"] = max(self.counts["longest"], shares.question)

    def _notes(self, *, labelled: bool) -> tuple[str, ...]:
        counts, settings = self.counts, self.settings
        total, several, cut = self.seen, counts["several"], counts["cut"]
        lines = {
            f"{several:,} of {total:,} contexts do not fit into a row: {len(self.ids):,} rows in all": several,
            f"{cut:,} of {total:,} questions were cut to {counts['longest']} tokens or fewer": cut,
            f"rows of {settings.sequence_length} tokens are too short for windows {settings.doc_stride} apart (doc_stride): "
            f"those of {counts['strides']:,} contexts stand closer": counts["strides"],
            f"{counts['lost']:,} of {total:,} answers are whole in no window": counts["lost"] * labelled,
            f"{counts['long']:,} of {total:,} answers are longer than max_answer_length {settings.max_answer_length}, so not "
            "predicted": counts["long"] * labelled,
        }
        return tuple(line for line, count in lines.items() if count)

    def features(self, *, labelled: bool, impossible: bool) -> Features:
        """All rows so far."""
        targets: dict[str, Column] = {}
        if labelled:
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
        return Features(ids, types, numbers, targets, places, self._notes(labelled=labelled))


def _windows(features: Features) -> list[WindowPlaces]:
    """Where the tokens of each row's window stand."""
    starts, ends = (cast(Ragged, features.places[name]) for name in ("starts", "ends"))
    table = cast(NDArray[np.int32], features.places["window"]).tolist()
    return [
        WindowPlaces(first, best_start, best_stop, starts[row], ends[row])
        for row, (first, best_start, best_stop) in enumerate(table)
    ]


def _is_impossible(example: QuestionExample) -> bool:
    """As the official metric decides it: there are no golds."""
    return bool(example.impossible) or not example.golds


def _snippet(example: QuestionExample, prediction: Prediction) -> str:
    """The context around the right answer, or, where there is none, around what was answered."""
    starts = [answer.start for answer in example.answers[:1]] or [answer["start"] for answer in prediction["nbest"][:1]]
    start = starts[0] if starts else 0
    begin, end = max(0, start - _AROUND), min(len(example.context), start + _AROUND)
    return ("..." if begin else "") + example.context[begin:end] + ("..." if end < len(example.context) else "")
