"""Extractive question answering: the answer to a question is a span of its context, or empty."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, cast, final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from discern.data.sources.documents import ProblemLog
from discern.data.tokenizer.tokens import encode_texts
from discern.errors import DataError
from discern.models.config import ModelConfig
from discern.models.heads import PredictionLayers
from discern.tasks.answer_heads import JointHead, SpanHead
from discern.tasks.base import (
    Answer,
    Definition,
    Labels,
    Outputs,
    Prediction,
    Predictions,
    QuestionExample,
    Reading,
    Scores,
    Task,
    TaskConfig,
    TaskHead,
    TextEncoder,
)
from discern.tasks.baselines import Baseline, answer_baselines
from discern.tasks.features import Column, Features, Ragged, cut_windows
from discern.tasks.metrics import CMRC, SQUAD1, Similarity, best_similarities, squad2_scores
from discern.tasks.readers.questions import FORMATS
from discern.tasks.rows import question_rows, read_rows

# Number of questions whose contexts are tokenized at a time; all formats keep the questions of a context together.
_BLOCK = 1000
# Starts per window, ends per start, and answers per question, as in the released code.
_CANDIDATES = 20
# Weight of the loss for predicting whether there is an answer, as there.
_ANSWERABLE_WEIGHT = 0.5
# Characters of context shown on each side of a wrong answer.
_AROUND = 80
_SPACE = re.compile(r"\s")


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
    max_answer_length: int = Field(30, ge=1, description="Maximum number of tokens of an answer.")

    @property
    def threshold(self) -> float:
        """The answer is empty if `no_answer`, in logits, exceeds this. That of the joint head is the released code's."""
        return -2.75 if self.head == "joint" else 0.0


class LocatedTokens(NamedTuple):
    """The T tokens of a text with their characters.

    Attributes:
        ids: (T,) token ids.
        starts: (T,) first character of each token, in the text before normalization.
        ends: (T,) end of its last character.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]

    def cover(self, answer: Answer) -> tuple[int, int]:
        """First and last of the fewest tokens that cover all characters of an answer; first > last if no token covers any."""
        first = np.searchsorted(self.ends, answer.start, side="right")
        last = np.searchsorted(self.starts, answer.start + len(answer.text)) - 1
        return int(first), int(last)


def located_tokens(texts: Sequence[str], encoder: TextEncoder) -> list[LocatedTokens]:
    """The tokens of each text, without special tokens.

    Characters that normalization drops (combining accents, joiners, control characters) belong to the token before them, so
    that a piece cut at tokens keeps them.
    """
    located = []
    for text, encoding in zip(texts, encode_texts(encoder.tokenizer, texts), strict=True):
        starts, ends = np.array(encoding.offsets, np.int32).reshape(-1, 2).T
        gaps = map(slice, ends, [*starts[1:], len(text)])
        dropped = [len(_SPACE.split(text[gap], maxsplit=1)[0]) for gap in gaps]
        located.append(LocatedTokens(np.array(encoding.ids, np.int32), starts, ends + np.array(dropped, np.int32)))
    return located


class Window(NamedTuple):
    """The window of a context in a row `[CLS] question [SEP] window [SEP]`.

    Attributes:
        best_start, best_stop: positions of the tokens that have most context in this window.
        starts, ends: characters of the context for each position up to the end of the window; 0 before the window.
    """

    best_start: int
    best_stop: int
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]


def best_answers(
    context: str, windows: Sequence[Window], outputs: Outputs, *, max_length: int, number: int
) -> list[dict[str, Any]]:
    """The answers with the highest scores, at most `number`, each text once; equal scores in the order of the windows.

    Args:
        windows: windows of the context.
        outputs: outputs of the head for each window; see `answer_heads`.
        max_length: maximum number of tokens of an answer.

    Returns:
        For each answer `text` and `start` in the context; `start_score`, `end_score` and their sum, `score`; and `probability`:
        the softmax of the scores.
    """
    spans = []
    for window, output in zip(windows, outputs, strict=True):
        # All pairs of a start and an end of the head with their scores.
        starts, ends = (np.rint(output[name]).astype(np.int64) for name in ("starts", "ends"))
        start_scores, end_scores = (output[name].astype(np.float64) for name in ("start_scores", "end_scores"))
        firsts, lasts, *scores = np.broadcast_arrays(starts[:, None], ends, start_scores[:, None], end_scores)
        # A start counts only where its token has most context, so that each span is scored with as much context as possible.
        admissible = (firsts >= window.best_start) & (firsts < window.best_stop) & (lasts < len(window.starts))
        admissible &= (lasts >= firsts) & (lasts - firsts < max_length)
        begins, stops = window.starts[firsts[admissible]], window.ends[lasts[admissible]]
        spans.append((begins, stops, *(values[admissible] for values in scores)))
    begins, stops, start_scores, end_scores = map(np.concatenate, zip(*spans, strict=True))
    totals = start_scores + end_scores
    span_of_text: dict[str, int] = {}
    for span in np.argsort(-totals, kind="stable"):
        # The tokens of some tokenizers include the space before them.
        text = context[begins[span] : stops[span]].strip()
        if text and len(span_of_text) < number:
            span_of_text.setdefault(text, span)
    best = totals[list(span_of_text.values())]
    shares = np.exp(best - best.max(initial=-np.inf))
    return [
        {
            "text": text,
            "start": context.index(text, begins[span]),
            "start_score": round(float(start_scores[span]), 6),
            "end_score": round(float(end_scores[span]), 6),
            "score": round(float(totals[span]), 6),
            "probability": round(float(share), 6),
        }
        for (text, span), share in zip(span_of_text.items(), shares / shares.sum(), strict=True)
    ]


class Questions(Task[QuestionExample]):
    """Start and end of the answer, predicted from `[CLS] question [SEP] window [SEP]`; long contexts make several windows.

    An answer is an unchanged piece of the context, with its case, accents and white space.
    Every question has an answer; scored as SQuAD 1.1 and MRQA 2019. Subclasses have other metrics.
    """

    family = "squad1"
    Config = QuestionConfig
    config: QuestionConfig
    make_rows = staticmethod(question_rows)
    has_impossible: ClassVar[bool] = False
    """Whether a question may have no answer in its context; it is then scored as in SQuAD 2.0."""
    similarities: ClassVar[Mapping[str, Similarity]] = SQUAD1
    """How an answer is compared with a gold answer, for `exact_match` and `f1`, if every question has an answer."""

    @classmethod
    def learn(cls, train: Reading[QuestionExample], config: TaskConfig, fixed: tuple[str, ...]) -> Labels:
        return Labels(("answerable", "impossible") if cls.has_impossible else (), "spans")

    @classmethod
    def read(
        cls, path: Path, definition: Definition[Any], split: str, config: TaskConfig, *, labeled: bool = True
    ) -> Reading[QuestionExample]:
        if definition.layout.format in FORMATS:
            reading = FORMATS[definition.layout.format](path, labeled=labeled)
        else:
            reading = read_rows(path, definition.layout, partial(question_rows, labeled=labeled), labeled=labeled)
        if split == "train":
            # Leave out what cannot be learned. In evaluation such questions count, as in the official metrics.
            problems, learnable = ProblemLog(), []
            for number, example in enumerate(reading.examples):
                if example.question.strip() and example.context.strip() and (example.answers or not example.golds):
                    learnable.append(example)
                else:
                    kind = "question without text, or without an answer that occurs in its context, left out"
                    problems.add(kind, reading.place(number))
            reading = replace(reading, examples=tuple(learnable), problems=(*reading.problems, *problems.summary()), places=())
            if not any(example.answers for example in learnable):
                details = "; ".join(map(str, reading.problems)) or "no question has one"
                raise DataError(
                    f"{path} has no answers to learn from: {details}", hint="an answer must occur in its context exactly"
                )
        impossible = sum(example.impossible is True for example in reading.examples)
        note = (f"{impossible:,} of {len(reading.examples):,} questions have no answer",) if impossible else ()
        return replace(reading, notes=(*reading.notes, *note))

    def check(self, reading: Reading[QuestionExample]) -> None:
        # A question has no answer by the criterion of the official metric: it has no golds.
        unanswered = [example for example in reading.examples if not example.golds]
        unexpected = [example.id for example in unanswered if example.impossible is None or not self.has_impossible]
        if unexpected:
            raise DataError(
                f"{reading.source}: question {unexpected[0]} has no answer ({len(unexpected):,} in all)",
                hint="give it an answer; or, if its context has none: in your own files, add such questions to the training file "
                'too; in SQuAD\'s format, use --task squad2 and mark it with "is_impossible": true',
            )

    def encode(self, examples: Sequence[QuestionExample], text: TextEncoder, *, labeled: bool) -> Features:
        config, special = self.config, text.special
        rows: list[dict[str, Any]] = []
        cut = several = unpredictable = 0
        for begin in range(0, len(examples), _BLOCK):
            block = examples[begin : begin + _BLOCK]
            contexts = list(dict.fromkeys(example.context for example in block))
            located = dict(zip(contexts, located_tokens(contexts, text), strict=True))
            questions = text.ids([example.question for example in block])
            for number, (example, question) in enumerate(zip(block, questions, strict=True), begin):
                context = located[example.context]

                # Divide the row [CLS] question [SEP] window [SEP]; the question gets a third of it at most.
                question_length = min(len(question), config.max_query_length, config.sequence_length // 3)
                window_length = config.sequence_length - question_length - 3
                # Windows overlap by `max_answer_length` tokens, so that every answer up to that length is whole in at least one
                # of them; windows that are too short for that overlap by half.
                stride = min(config.doc_stride, max(window_length - config.max_answer_length, window_length // 2, 1))
                windows = cut_windows(np.arange(len(context.ids) + 1), window_length, window_length - stride)

                # Of several answers the first is learned; the metric accepts any of them.
                first, last = context.cover(example.answers[0]) if example.answers else (0, -1)
                prefix = [special.cls, *question[:question_length], special.sep]
                has_answer = False
                for start, stop, *best in windows:
                    # A window without the answer has [CLS] as start and end, but counts as answerable if its question is. The
                    # released code does the same, and takes the minimum over the windows of a question.
                    shift, span = len(prefix) - start, (0, 0)
                    if start <= first <= last < stop:
                        span = first + shift, last + shift
                        has_answer = last - first < config.max_answer_length
                    row = {
                        "example": number,
                        "ids": np.concatenate([prefix, context.ids[start:stop], [special.sep]]),
                        "types": np.repeat([0, 1], [len(prefix), stop - start + 1]),
                        "best": [position + shift for position in best],
                        "starts": np.pad(context.starts[start:stop], (len(prefix), 0)),
                        "ends": np.pad(context.ends[start:stop], (len(prefix), 0)),
                        "span": span,
                        "impossible": not example.golds,
                    }
                    rows.append(row)

                cut += question_length < len(question)
                several += len(windows) > 1
                unpredictable += bool(example.answers) and not has_answer

        total = len(examples)
        notes = {
            f"{several:,} of {total:,} contexts do not fit into a row: {len(rows):,} rows in total. If the model has the "
            f"positions, longer rows are fewer: --set task.sequence_length={2 * config.sequence_length}": several,
            f"{cut:,} of {total:,} questions were cut: a question has at most {config.max_query_length} tokens "
            "(task.max_query_length) and a third of the row": cut,
            f"{unpredictable:,} of {total:,} answers cannot be predicted, because they are longer than task.max_answer_length "
            f"({config.max_answer_length} tokens) or than the window of a row": unpredictable,
        }
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        targets: dict[str, Column] = {}
        if labeled:
            targets["start"], targets["end"] = np.array(columns["span"]).T
            if self.has_impossible:
                targets["impossible"] = np.array(columns["impossible"], np.float32)
        return Features(
            Ragged.of(columns["ids"]),
            Ragged.of(columns["types"], np.uint8),
            np.array(columns["example"]),
            targets,
            {"best": np.array(columns["best"]), "starts": Ragged.of(columns["starts"]), "ends": Ragged.of(columns["ends"])},
            tuple(note for note, count in notes.items() if count),
        )

    def head(self, encoder: ModelConfig, dropout: float) -> TaskHead:
        config, size = self.config, encoder.hidden_size
        if config.head == "prediction":
            return SpanHead(size, _CANDIDATES, PredictionLayers(encoder), dropout)
        # No dropout before the other heads, as in the released code and in BERT for question answering.
        if config.head == "span":
            return SpanHead(size, _CANDIDATES)
        return JointHead(size, _CANDIDATES, _ANSWERABLE_WEIGHT if self.has_impossible else None)

    def predict(self, examples: Sequence[QuestionExample], features: Features, outputs: Outputs) -> list[Prediction]:
        config = self.config
        best, starts, ends = (cast(Any, features.places[name]) for name in ("best", "starts", "ends"))
        bounds = np.searchsorted(features.example, np.arange(len(examples) + 1))
        predictions = []
        for example, begin, stop in zip(examples, bounds[:-1], bounds[1:], strict=True):
            windows = [Window(best[row][0], best[row][1], starts[row], ends[row]) for row in range(begin, stop)]
            answers = best_answers(
                example.context, windows, outputs[begin:stop], max_length=config.max_answer_length, number=_CANDIDATES
            )
            text = answers[0]["text"] if answers else ""
            prediction: Prediction = {"id": example.id, "answer": text, "best_answer": text}
            if self.has_impossible:
                no_answer = min(float(output["null"]) for output in outputs[begin:stop])
                # The logits of the span heads are comparable with those of spans.
                if answers and config.head != "joint":
                    no_answer -= answers[0]["score"]
                prediction["no_answer"] = round(no_answer, 6)
                if prediction["no_answer"] > config.threshold:
                    prediction["answer"] = ""
            predictions.append(prediction | {"nbest": answers})
        return predictions

    def score(self, examples: Sequence[QuestionExample], predictions: Predictions) -> Scores:
        golds = [example.golds for example in examples]
        answers = [prediction["best_answer" if self.has_impossible else "answer"] for prediction in predictions]
        if self.has_impossible:
            no_answer = [prediction["no_answer"] for prediction in predictions]
            values = squad2_scores(golds, answers, no_answer, self.config.threshold)
        else:
            values = {name: float(best_similarities(golds, answers, metric).mean()) for name, metric in self.similarities.items()}
        return Scores({name: values[name] for name in self.metrics} | values)

    def metric_terms(self, metric: str, examples: Sequence[QuestionExample], predictions: Predictions) -> NDArray[np.float64]:
        scores = [self.score([example], [each]) for example, each in zip(examples, predictions, strict=True)]
        return np.array([(score.values[metric], 1) for score in scores], np.float64)

    def mistakes(self, examples: Sequence[QuestionExample], predictions: Predictions) -> list[dict[str, Any]]:
        similarities = self.metric_terms("f1", examples, predictions)[:, 0].tolist()
        records = []
        for example, prediction, similarity in zip(examples, predictions, similarities, strict=True):
            if similarity < 1:
                # The context around the correct answer, or around the predicted one if there is none.
                starts = [*(answer.start for answer in example.answers), *(answer["start"] for answer in prediction["nbest"]), 0]
                begin, end = max(0, starts[0] - _AROUND), starts[0] + _AROUND
                snippet = "..." * (begin > 0) + example.context[begin:end] + "..." * (end < len(example.context))
                record = {name: value for name, value in prediction.items() if name != "nbest"}
                record |= {"text": example.question, "gold": list(dict.fromkeys(example.golds or ("",))), "context": snippet}
                records.append(record | {"badness": round(1 - similarity, 6)})
        return sorted(records, key=lambda record: -record["badness"])

    def failure(self, examples: Sequence[QuestionExample], predictions: Predictions) -> str | None:
        answers = {prediction["answer"] for prediction in predictions}
        if len(predictions) < 2 or len(answers) > 1 or not self.mistakes(examples, predictions):
            return None
        answer = answers.pop()
        return f"every answer is '{answer}'" if answer else "every answer is empty"

    def baselines(self) -> Sequence[Baseline[QuestionExample]]:
        return answer_baselines(threshold=self.config.threshold, has_impossible=self.has_impossible)


@final
class CmrcQuestions(Questions):
    """Every question has an answer; scored as CMRC 2018, by characters."""

    family = "cmrc"
    similarities = CMRC


@final
class Squad2Questions(Questions):
    """Some questions have no answer; scored as SQuAD 2.0, with the threshold of the settings and with the best one."""

    family = "squad2"
    has_impossible = True
