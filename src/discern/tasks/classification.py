"""Classification of a text or a pair of texts: one class, several classes, or a number."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from discern.data.tables import number_in
from discern.errors import DataError, nearest
from discern.models.config import ModelConfig
from discern.models.heads import NGrams, PairStates, PredictionLayers, mean_state
from discern.models.layers import Dropout
from discern.tasks.base import (
    ClassificationExample,
    Definition,
    Labels,
    LossAndOutputs,
    Outputs,
    Prediction,
    Predictions,
    Reading,
    Scores,
    Task,
    TaskConfig,
    TaskHead,
    TextEncoder,
    label_counts,
)
from discern.tasks.baselines import Baseline, text_baselines
from discern.tasks.features import Features, Ragged, TaskRows
from discern.tasks.metrics import class_scores, label_set_scores, number_scores
from discern.tasks.rows import read_texts, text_rows
from discern.types import TokenBatch

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"summary": torch.tanh, "dense": F.gelu}
# Key of what is predicted, by the kind of the labels.
PREDICTED = {"single": "label", "multi": "labels", "number": "score"}


class ClassificationConfig(TaskConfig):
    """Settings of classification and regression."""

    class_weights: Literal["none", "balanced"] = Field(
        "none",
        description="Weights of the classes in the loss. 'balanced': number of examples / (classes x examples of the class).",
    )
    head: Literal["linear", "summary", "dense", "prediction"] = Field(
        "linear",
        description="'linear': one linear layer on the state of [CLS]. 'summary': preceded by a layer of the same width and a "
        "tanh, as in BERT. 'dense': with GELU instead of tanh, as ELECTRA in Hugging Face transformers. 'prediction': with GELU "
        "and a LayerNorm, as in transformers' newer encoders, for which it is the default.",
    )
    pooling: Literal["auto", "cls", "mean", "mean-words", "pair"] = Field(
        "auto",
        description="State that the head reads. 'cls': the state of [CLS]. 'mean': the mean over all tokens, [CLS] and [SEP] "
        "included; transformers has it only where 'prediction' is the default. 'mean-words': the mean over the states and the "
        "word embeddings of all tokens, read by one linear layer. 'pair': computed from two texts by comparing "
        "their means and their aligned tokens, or from [CLS] and the means of a single text; transformers does not have it. "
        "'auto': 'pair' for pairs of texts and networks smaller than ELECTRA-Small, otherwise 'cls'.",
    )
    compare_words: bool = Field(
        True,
        description="With pooling 'pair', read the word embeddings of the tokens as well as their states, from which the word "
        "itself may have been lost. Ignored with other poolings.",
    )
    words: bool = Field(
        False,
        description="Add a linear model of n-grams of tokens to the outputs after the training; for two texts, also of what they "
        "share. On small data, both together are usually better than one; transformers does not have it.",
    )
    swap_pairs: bool = Field(
        False, description="Train on each pair in both orders. The released code does so for MRPC and STS-B ('double_unordered')."
    )


class ClassificationHead(TaskHead):
    """Dropout and one linear layer on one state of the row, possibly preceded by other layers; see `ClassificationConfig`.

    Reference: google-research/electra, finetune/classification; Hugging Face has a dense layer and GELU in between. The
    summary: zihangdai/xlnet, modeling.py, `summarize_sequence`.

    Args:
        encoder: settings of the encoder.
        labels: labels, which decide the number of outputs and the loss.
    """

    weights: Tensor

    def __init__(self, encoder: ModelConfig, dropout: float, labels: Labels, settings: ClassificationConfig) -> None:
        super().__init__()
        size, outputs = encoder.hidden_size, max(1, len(labels.names))
        self.pooling = settings.pooling
        if settings.pooling == "auto":
            # Larger encoders compare pairs in their own layers, as in the published results.
            self.pooling = "pair" if labels.pairs and encoder.smaller_than_electra_small else "cls"
        self.reads_words = self.pooling == "mean-words" or (self.pooling == "pair" and settings.compare_words)
        input_size = size + encoder.embedding_size if self.reads_words else size
        linear = self.pooling == "mean-words"
        self.pair = PairStates(input_size, size, dropout) if self.pooling == "pair" else None
        self.activation = None if linear else _ACTIVATIONS.get(settings.head)
        self.summary = nn.Linear(size, size) if self.activation is not None else None
        self.inner = PredictionLayers(encoder) if settings.head == "prediction" and not linear else None
        self.dropout = Dropout(dropout)
        self.output = nn.Linear(input_size if linear else size, outputs)
        self.ngrams = NGrams(outputs, pairs=labels.pairs) if settings.words else None
        self.register_buffer("weights", torch.tensor(labels.weights or (1.0,) * outputs), persistent=False)

    def forward(self, hidden: Float[Tensor, "R L D"], tokens: TokenBatch, rows: TaskRows) -> LossAndOutputs:
        if self.pair is not None:
            state = self.pair(hidden, tokens)
        else:
            state = hidden[:, 0] if self.pooling == "cls" else mean_state(hidden, tokens.attention_mask)
        if self.summary is not None and self.activation is not None:
            state = self.activation(self.summary(state))
        if self.inner is not None:
            state = self.inner(state)
        logits = self.output(self.dropout(state)).float()
        if self.ngrams is not None and not self.training:
            logits = logits + self.ngrams(tokens.input_ids, tokens.attention_mask, tokens.token_type_ids)
        loss = None
        if "class" in rows.targets:
            loss = F.cross_entropy(logits, rows.targets["class"], self.weights, reduction="sum")
        elif "classes" in rows.targets:
            losses = F.binary_cross_entropy_with_logits(logits, rows.targets["classes"], reduction="none")
            loss = (losses * self.weights).sum()
        elif "score" in rows.targets:
            loss = (logits[:, 0] - rows.targets["score"]).square().sum()
        return loss, {"logits": logits}


class Classification(Task[ClassificationExample]):
    """One class (softmax), several classes (sigmoids) or a number (squared error), predicted from one state of the row.

    A pair that is too long is truncated at the end of its longer text, as in BERT.
    """

    Config = ClassificationConfig
    config: ClassificationConfig
    family = "classification"
    make_rows = staticmethod(text_rows)

    @classmethod
    def learn(cls, train: Reading[ClassificationExample], config: TaskConfig, fixed: tuple[str, ...]) -> Labels:
        distinct = {example.label for example in train.examples}
        if None in distinct:
            raise DataError(f"{train.source} has no labels to train on", hint="train on a file with labels")
        if len(distinct) < 2:
            hint = f"give the whole file, with {', '.join(fixed)}" if fixed else "check the column of the labels: --label COLUMN"
            raise DataError(f"every example of {train.source} is '{distinct.pop()}': there is nothing to learn", hint=hint)
        pairs = any(example.pair is not None for example in train.examples)
        kinds = {type(label) for label in distinct}
        if kinds == {float}:
            # Scores are trained in units of their standard deviation, or of the range that the task fixes.
            if fixed:
                low, high = map(float, fixed)
                return Labels((), "number", scale=high - low, shift=low, pairs=pairs)
            scores = np.array([example.label for example in train.examples], np.float64)
            return Labels((), "number", scale=float(scores.std()), shift=float(scores.mean()), pairs=pairs)
        counts = label_counts(train.examples)
        names = fixed or tuple(sorted(counts, key=_numerically))
        weights: tuple[float, ...] = ()
        if cast(ClassificationConfig, config).class_weights == "balanced":
            total = len(train.examples)
            weights = tuple(total / (len(names) * counts[name]) if name in counts else 0.0 for name in names)
        return Labels(names, "multi" if kinds == {tuple} else "single", weights=weights, pairs=pairs)

    @classmethod
    def read(
        cls, path: Path, definition: Definition[Any], split: str, config: TaskConfig, *, labeled: bool = True
    ) -> Reading[ClassificationExample]:
        return read_texts(path, definition.layout, definition.labels, labeled=labeled)

    def check(self, reading: Reading[ClassificationExample]) -> None:
        counts = label_counts(reading.examples)
        unknown = next((name for name in counts if name not in self.labels.names), None)
        if unknown is not None and self.labels.kind != "number":
            first = next(number for number, example in enumerate(reading.examples) if unknown in label_counts([example]))
            similar = nearest(unknown, self.labels.names)
            question = f"did you mean '{similar}'? Otherwise " if similar else ""
            raise DataError(
                f"{reading.place(first)}: label '{unknown}' ({counts[unknown]:,} in the file) does not occur in the "
                f"training file, whose labels are {', '.join(self.labels.names[:20])}",
                hint=f"{question}add examples of it to the training file, or remove it from this file",
            )

    def training_examples(self, examples: Sequence[ClassificationExample]) -> Sequence[ClassificationExample]:
        if not self.config.swap_pairs:
            return examples
        swapped = (replace(example, text=example.pair, pair=example.text) for example in examples if example.pair is not None)
        return (*examples, *swapped)

    def encode(self, examples: Sequence[ClassificationExample], text: TextEncoder, *, labeled: bool) -> Features:
        length = self.config.sequence_length
        firsts, seconds = text.ids([example.text for example in examples]), text.ids([example.pair or "" for example in examples])
        rows = [
            frame_texts(first, None if example.pair is None else second, text, length)
            for example, first, second in zip(examples, firsts, seconds, strict=True)
        ]
        cut = sum(was_cut for _, _, was_cut in rows)
        return Features(
            Ragged.of(ids for ids, _, _ in rows),
            Ragged.of((segments for _, segments, _ in rows), np.uint8),
            np.arange(len(examples)),
            self._targets(examples) if labeled else {},
            notes=(f"{cut:,} of {len(examples):,} texts were cut to {length} tokens",) if cut else (),
        )

    def _targets(self, examples: Sequence[ClassificationExample]) -> dict[str, NDArray[Any]]:
        labels: list[Any] = [example.label for example in examples]
        if self.labels.kind == "number":
            return {"score": ((np.array(labels, np.float64) - self.labels.shift) / self.labels.scale).astype(np.float32)}
        classes = {name: number for number, name in enumerate(self.labels.names)}
        if self.labels.kind == "single":
            return {"class": np.array([classes[label] for label in labels], np.int64)}
        has_class = [[name in names for name in classes] for names in labels]
        return {"classes": np.array(has_class, np.float32).reshape(len(examples), len(classes))}

    def head(self, encoder: ModelConfig, dropout: float) -> ClassificationHead:
        return ClassificationHead(encoder, dropout, self.labels, self.config)

    def predict(self, examples: Sequence[ClassificationExample], features: Features, outputs: Outputs) -> list[Prediction]:
        labels, predictions = self.labels, []
        for example, output in zip(examples, outputs, strict=True):
            logits = output["logits"].astype(np.float64)
            prediction: Prediction = {"id": example.id}
            if labels.kind == "number":
                prediction["score"] = float(labels.scale * logits[0] + labels.shift)
            else:
                if labels.kind == "multi":
                    probabilities = 1 / (1 + np.exp(-logits))
                    prediction["labels"] = [name for name, value in zip(labels.names, probabilities, strict=True) if value >= 0.5]
                else:
                    exponents = np.exp(logits - logits.max())
                    probabilities = exponents / exponents.sum()
                    prediction["label"] = labels.names[int(logits.argmax())]
                prediction["probabilities"] = dict(zip(labels.names, probabilities.round(6).tolist(), strict=True))
            predictions.append(prediction | {"logits": logits.round(6).tolist()})
        return predictions

    def score(self, examples: Sequence[ClassificationExample], predictions: Predictions) -> Scores:
        gold: list[Any] = [example.label for example in examples]
        predicted = [prediction[PREDICTED[self.labels.kind]] for prediction in predictions]
        if self.labels.kind == "number":
            return number_scores(gold, predicted, self.metrics)
        if self.labels.kind == "multi":
            return label_set_scores(gold, predicted, self.metrics)
        positive = self.labels.names[1] if len(self.labels.names) == 2 else "1"
        return class_scores(gold, predicted, self.metrics, positive)

    def metric_terms(
        self, metric: str, examples: Sequence[ClassificationExample], predictions: Predictions
    ) -> NDArray[np.float64] | None:
        if metric not in ("accuracy", "exact_match", "micro_f1"):
            return None
        gold: list[Any] = [set(each.label) if isinstance(each.label, tuple) else {each.label} for each in examples]
        chosen = [set(each["labels"]) if self.labels.kind == "multi" else {each["label"]} for each in predictions]
        pairs = zip(gold, chosen, strict=True)
        if metric == "micro_f1":
            return np.array([(2 * len(truth & guess), len(truth) + len(guess)) for truth, guess in pairs], np.float64)
        return np.array([(truth == guess, 1) for truth, guess in pairs], np.float64)

    def mistakes(self, examples: Sequence[ClassificationExample], predictions: Predictions) -> list[dict[str, Any]]:
        records = []
        for example, prediction in zip(examples, predictions, strict=True):
            gold: Any = example.label
            predicted = prediction[PREDICTED[self.labels.kind]]
            wrong = set(predicted) != set(gold) if self.labels.kind == "multi" else predicted != gold
            if not wrong:
                continue
            # The distance of a score, or the negative log-probability of what is right in nats.
            if self.labels.kind == "number":
                badness = abs(predicted - gold)
            else:
                probabilities = prediction["probabilities"]
                right = (
                    [probabilities[gold]]
                    if self.labels.kind == "single"
                    else [value if name in gold else 1 - value for name, value in probabilities.items()]
                )
                badness = sum(-math.log(max(probability, 1e-12)) for probability in right)
            pair = {} if example.pair is None else {"pair": example.pair}
            records.append({**prediction, "text": example.text, **pair, "gold": gold, "badness": round(badness, 6)})
        return sorted(records, key=lambda record: -record["badness"])

    def failure(self, examples: Sequence[ClassificationExample], predictions: Predictions) -> str | None:
        if len(predictions) < 2:
            return None
        if self.labels.kind == "number":
            scores = [prediction["score"] for prediction in predictions]
            gold: list[Any] = [example.label for example in examples]
            least = 1e-3 * abs(self.labels.scale)
            learned_nothing = max(scores) - min(scores) < least <= max(gold) - min(gold)
            return f"every prediction is about {scores[0]:.3g}" if learned_nothing else None
        predicted = {str(prediction[PREDICTED[self.labels.kind]]) for prediction in predictions}
        if len(predicted) > 1 or not self.mistakes(examples, predictions):
            return None
        return f"every prediction is {predicted.pop()}"

    def baselines(self) -> Sequence[Baseline[ClassificationExample]]:
        return text_baselines(self.labels)


def frame_texts(
    first: Sequence[int], second: Sequence[int] | None, text: TextEncoder, length: int
) -> tuple[NDArray[np.int32], NDArray[np.uint8], bool]:
    """`[CLS] first [SEP]` or `[CLS] first [SEP] second [SEP]` with the segments, and whether anything was truncated.

    The longer text is truncated at its end; if both are equally long, the second one.
    """
    room = length - (2 if second is None else 3)
    other = second or ()
    # The first text has the room that the second leaves, and at least half of it, rounded up.
    left = first[: max(room - len(other), room - room // 2)]
    right = other[: room - len(left)]
    row = [text.special.cls, *left, text.special.sep]
    segments = [0] * len(row)
    if second is not None:
        row += [*right, text.special.sep]
        segments += [1] * (len(right) + 1)
    was_cut = len(left) + len(right) < len(first) + len(other)
    return np.array(row, np.int32), np.array(segments, np.uint8), was_cut


def _numerically(name: str) -> tuple[bool, float, str]:
    """Sort key that puts numeric labels first, in numeric order."""
    number = number_in(name)
    return number is None, number or 0.0, name
