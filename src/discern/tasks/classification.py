"""Classification of a text or a pair of texts: one class, several classes, or a number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from discern.errors import DataError, nearest
from discern.models.config import ModelConfig
from discern.models.fused_ops import Dropout
from discern.models.heads import PredictionLayers
from discern.tasks.base import Labels, Outputs, Prediction, Task, TaskConfig, TaskHead, TextEncoder
from discern.tasks.examples import ClassificationExample, Reading, label_counts
from discern.tasks.features import Features, Ragged, TaskRows
from discern.tasks.metrics import Scores
from discern.tasks.pairs import PairStates, mean_state
from discern.types import TokenBatch

if TYPE_CHECKING:
    from discern.tasks.baselines.base import Baseline

# Number of texts tokenized at a time: the id lists of a large file take more memory than its rows.
_BLOCK = 10_000
Pooling = Literal["cls", "mean", "pair"]
_ACTIVATIONS: dict[str, Literal["tanh", "gelu"]] = {"summary": "tanh", "dense": "gelu"}


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
    pooling: Literal["auto", "cls", "mean", "pair"] = Field(
        "auto",
        description="State that the head reads. 'cls': the state of [CLS]. 'mean': the mean over all tokens, [CLS] and [SEP] "
        "included; transformers has it only where 'prediction' is the default. 'pair': computed from two texts by comparing "
        "their means and their aligned tokens, or from [CLS] and the means of a single text; transformers does not have it. "
        "'auto': 'pair' for pairs of texts and networks smaller than ELECTRA-Small, otherwise 'cls'.",
    )
    compare_words: bool = Field(
        True,
        description="With pooling 'pair', read the word embeddings of the tokens as well as their states, from which the word "
        "itself may have been lost. Ignored with other poolings.",
    )
    swap_pairs: bool = Field(
        False, description="Train on each pair in both orders. The released code does so for MRPC and STS-B ('double_unordered')."
    )


class ClassificationHead(TaskHead):
    """Dropout and one linear layer on the state of [CLS], or on the mean of all states, possibly preceded by other layers.

    Reference: google-research/electra, finetune/classification; Hugging Face has a dense layer and GELU in between. The
    summary: zihangdai/xlnet, modeling.py, `summarize_sequence`.

    Args:
        labels: labels, which decide the number of outputs and the loss.
        activation: activation of a summary, a dense layer before the last: tanh or the exact GELU; None: no summary.
        inner: ModernBERT's layers before the last one, instead of a summary.
        pooling: 'cls': the head reads the state of [CLS]; 'mean': the mean over all tokens; 'pair': see `PairStates`.
        words: width E of the word embeddings that pooling 'pair' compares, too; 0: it compares only states.
    """

    weights: Tensor

    def __init__(
        self,
        hidden_size: int,
        dropout: float,
        labels: Labels,
        *,
        activation: Literal["tanh", "gelu"] | None = None,
        inner: PredictionLayers | None = None,
        pooling: Pooling = "cls",
        words: int = 0,
    ) -> None:
        super().__init__()
        self.kind = labels.kind
        self.activation = activation
        self.pooling = pooling
        self.pair = PairStates(hidden_size + words, hidden_size, dropout) if pooling == "pair" else None
        self.reads_words = self.pair is not None and words > 0
        self.summary = nn.Linear(hidden_size, hidden_size) if activation is not None else None
        self.inner = inner
        self.dropout = Dropout(dropout)
        self.output = nn.Linear(hidden_size, max(1, len(labels.names)))
        weights = labels.weights or (1.0,) * max(1, len(labels.names))
        self.register_buffer("weights", torch.tensor(weights), persistent=False)

    def forward(
        self, hidden: Float[Tensor, "R L D"], tokens: TokenBatch, rows: TaskRows
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        if self.pair is not None:
            state = self.pair(hidden, tokens)
        else:
            state = hidden[:, 0] if self.pooling == "cls" else mean_state(hidden, tokens.attention_mask)
        if self.summary is not None:
            state = self.summary(state)
            state = state.tanh() if self.activation == "tanh" else F.gelu(state)
        if self.inner is not None:
            state = self.inner(state)
        logits = self.output(self.dropout(state)).float()
        loss = None
        if "class" in rows.targets:
            loss = F.cross_entropy(logits, rows.targets["class"], self.weights, reduction="sum")
        elif "classes" in rows.targets:
            each = F.binary_cross_entropy_with_logits(logits, rows.targets["classes"], reduction="none")
            loss = (each * self.weights).sum()
        elif "score" in rows.targets:
            loss = (logits[:, 0] - rows.targets["score"]).square().sum()
        return loss, {"logits": logits.detach()}


class Classification(Task[ClassificationExample]):
    """One class (softmax), several classes (sigmoids) or a number (squared error), predicted from one state of the row.

    A pair that is too long is truncated at the end of its longer text, as in BERT.
    """

    Config: ClassVar[type[TaskConfig]] = ClassificationConfig
    family: ClassVar[str] = "classification"

    @classmethod
    def learn(cls, train: Reading[ClassificationExample], config: TaskConfig, fixed: tuple[str, ...]) -> Labels:
        kinds = {type(example.label) for example in train.examples}
        if type(None) in kinds:
            raise DataError(f"{train.source} has no labels to train on", hint="train on a file with labels")
        pairs = any(example.pair is not None for example in train.examples)
        if kinds == {float}:
            return replace(_scores_of(train, fixed), pairs=pairs)
        counts = label_counts(train.examples)
        names = fixed or tuple(sorted(counts, key=_numerically))
        kind = "multi" if kinds == {tuple} else "single"
        if len(counts) < 2 and kind == "single":
            raise DataError(
                f"every example of {train.source} is '{next(iter(counts))}': there is nothing to learn",
                hint=f"give the whole file, with {', '.join(fixed)}"
                if fixed
                else "check the column of the label: --label COLUMN",
            )
        if not names:
            raise DataError(f"no example of {train.source} has a label", hint="check the column of the labels: --label COLUMN")
        balanced = cast(ClassificationConfig, config).class_weights == "balanced"
        total = len(train.examples)
        weights = tuple(total / (len(names) * counts[name]) if counts.get(name) else 0.0 for name in names) if balanced else ()
        return Labels(names, kind, weights=weights, pairs=pairs)

    def check(self, reading: Reading[ClassificationExample]) -> None:
        found = label_counts(reading.examples)
        unknown = [name for name in found if name not in self.labels.names]
        if unknown and self.labels.kind != "number":
            similar = nearest(unknown[0], self.labels.names)
            near = f"did you mean '{similar}'? Otherwise " if similar else ""
            first = next(place for place, each in enumerate(reading.examples) if unknown[0] in _classes(each))
            raise DataError(
                f"{reading.place(first)}: label '{unknown[0]}' ({found[unknown[0]]:,} in the file) does not occur in the "
                f"training file, whose labels are {', '.join(self.labels.names[:20])}",
                hint=f"{near}add examples of it to the training file, or remove it from this file",
            )

    def training_examples(self, examples: Sequence[ClassificationExample]) -> Sequence[ClassificationExample]:
        if not cast(ClassificationConfig, self.config).swap_pairs:
            return examples
        swapped = (ClassificationExample(each.id, each.pair, each.text, each.label) for each in examples if each.pair is not None)
        return (*examples, *swapped)

    def encode(self, examples: Sequence[ClassificationExample], text: TextEncoder, *, labeled: bool) -> Features:
        ids: list[NDArray[np.int32]] = []
        types: list[NDArray[np.uint8]] = []
        cut = 0
        for start in range(0, len(examples), _BLOCK):
            block = examples[start : start + _BLOCK]
            firsts = text.ids([example.text for example in block])
            seconds = iter(text.ids([example.pair for example in block if example.pair is not None]))
            for example, first in zip(block, firsts, strict=True):
                second = next(seconds) if example.pair is not None else None
                row, segments, was_cut = frame_texts(first, second, text, self.config.sequence_length)
                ids.append(row)
                types.append(segments)
                cut += was_cut
        notes = (f"{cut:,} of {len(examples):,} texts were cut to {self.config.sequence_length} tokens",) if cut else ()
        targets = self._targets(examples) if labeled else {}
        return Features(Ragged.of(ids), Ragged.of(types, np.uint8), np.arange(len(examples)), targets, notes=notes)

    def _targets(self, examples: Sequence[ClassificationExample]) -> dict[str, NDArray[Any]]:
        labels = self.labels
        if labels.kind == "number":
            scores = np.array([example.label for example in examples], np.float64)
            return {"score": ((scores - labels.shift) / labels.scale).astype(np.float32)}
        places = {name: place for place, name in enumerate(labels.names)}
        if labels.kind == "single":
            return {"class": np.array([places[cast(str, example.label)] for example in examples], np.int64)}
        table = np.zeros((len(examples), len(places)), np.float32)
        for row, example in enumerate(examples):
            table[row, [places[name] for name in cast(tuple[str, ...], example.label)]] = 1
        return {"classes": table}

    def head(self, encoder: ModelConfig, dropout: float) -> ClassificationHead:
        settings = cast(ClassificationConfig, self.config)
        return ClassificationHead(
            encoder.hidden_size,
            dropout,
            self.labels,
            activation=_ACTIVATIONS.get(settings.head),
            inner=PredictionLayers(encoder) if settings.head == "prediction" else None,
            pooling=self._pooling(settings.pooling, encoder),
            words=encoder.embedding_size if settings.compare_words else 0,
        )

    def _pooling(self, setting: Literal["auto"] | Pooling, encoder: ModelConfig) -> Pooling:
        if setting != "auto":
            return setting
        # Larger encoders compare pairs in their own layers, as in the published results.
        return "pair" if self.labels.pairs and encoder.smaller_than_electra_small else "cls"

    def items(self, rows: TaskRows) -> int:
        return len(rows.rows)

    def predict(self, examples: Sequence[ClassificationExample], features: Features, outputs: Outputs) -> list[Prediction]:
        logits = np.stack([row["logits"] for row in outputs]).astype(np.float64) if len(outputs) else np.zeros((0, 1))
        return [self._prediction(example.id, row) for example, row in zip(examples, logits, strict=True)]

    def _prediction(self, identity: str, logits: NDArray[np.float64]) -> Prediction:
        labels = self.labels
        shown = [round(float(value), 6) for value in logits]
        if labels.kind == "number":
            return {"id": identity, "score": float(labels.scale * logits[0] + labels.shift), "logits": shown}
        if labels.kind == "multi":
            each = 1 / (1 + np.exp(-logits))
            chosen = [name for name, value in zip(labels.names, each, strict=True) if value >= 0.5]
            return {"id": identity, "labels": chosen, "probabilities": _named(labels.names, each), "logits": shown}
        exponents = np.exp(logits - logits.max())
        each = exponents / exponents.sum()
        return {
            "id": identity,
            "label": labels.names[int(logits.argmax())],
            "probabilities": _named(labels.names, each),
            "logits": shown,
        }

    def score(self, examples: Sequence[ClassificationExample], predictions: Sequence[Prediction]) -> Scores:
        # Only here: scikit-learn and scipy.stats take as long to import as torch.
        from discern.tasks.metrics.classification import class_scores, label_set_scores, number_scores

        gold: list[Any] = [example.label for example in examples]
        if self.labels.kind == "number":
            return number_scores(gold, [prediction["score"] for prediction in predictions], self.metrics)
        if self.labels.kind == "multi":
            return label_set_scores(gold, [prediction["labels"] for prediction in predictions], self.metrics)
        positive = self.labels.names[1] if len(self.labels.names) == 2 else None
        return class_scores(gold, [prediction["label"] for prediction in predictions], self.metrics, positive)

    def mistakes(self, examples: Sequence[ClassificationExample], predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
        found = []
        for example, prediction in zip(examples, predictions, strict=True):
            badness, wrong = self._badness(example, prediction)
            if wrong:
                pair = {"pair": example.pair} if example.pair is not None else {}
                found.append({**prediction, "text": example.text, **pair, "gold": example.label, "badness": round(badness, 6)})
        return sorted(found, key=lambda record: -record["badness"])

    def _badness(self, example: ClassificationExample, prediction: Prediction) -> tuple[float, bool]:
        """Distance, or negative log-probability in nats, and whether the prediction is wrong at all."""
        if self.labels.kind == "number":
            distance = abs(prediction["score"] - cast(float, example.label))
            return distance, distance > 0
        probabilities = prediction["probabilities"]
        if self.labels.kind == "single":
            return -math.log(max(probabilities[example.label], 1e-12)), prediction["label"] != example.label
        gold = set(cast(tuple[str, ...], example.label))
        surprise = sum(-math.log(max(value if name in gold else 1 - value, 1e-12)) for name, value in probabilities.items())
        return surprise, set(prediction["labels"]) != gold

    def failure(self, examples: Sequence[ClassificationExample], predictions: Sequence[Prediction]) -> str | None:
        if len(predictions) < 2:
            return None
        if self.labels.kind == "number":
            scores = [prediction["score"] for prediction in predictions]
            gold = [cast(float, example.label) for example in examples]
            least = 1e-3 * abs(self.labels.scale)
            learned_nothing = max(scores) - min(scores) < least <= max(gold) - min(gold)
            return f"every prediction is about {scores[0]:.3g}" if learned_nothing else None
        key = "label" if self.labels.kind == "single" else "labels"
        predicted = {str(prediction[key]) for prediction in predictions}
        if len(predicted) > 1 or not self.mistakes(examples, predictions):
            return None
        return f"every prediction is {predicted.pop()}"

    def baselines(self) -> Sequence[Baseline[ClassificationExample]]:
        from discern.tasks.baselines.texts import text_baselines

        return text_baselines(self.labels)


def _classes(example: ClassificationExample) -> tuple[str, ...]:
    """The classes that an example is labeled with."""
    label = example.label
    return label if isinstance(label, tuple) else (label,) if isinstance(label, str) else ()


def frame_texts(
    first: Sequence[int], second: Sequence[int] | None, text: TextEncoder, length: int
) -> tuple[NDArray[np.int32], NDArray[np.uint8], bool]:
    """`[CLS] first [SEP]` or `[CLS] first [SEP] second [SEP]` with the segments, and whether anything was truncated.

    The longer text is truncated at its end; if both are equally long, the second one.
    """
    special = text.special
    room = length - (2 if second is None else 3)
    kept: Sequence[int]
    other: Sequence[int] = ()
    if second is None:
        kept = first[:room]
    else:
        over = max(0, len(first) + len(second) - room)
        # Both are truncated to the same length once the longer has been truncated to the shorter.
        shorter = min(len(first), len(second))
        if shorter <= room // 2:
            left, right = (room - shorter, shorter) if len(first) > len(second) else (shorter, room - shorter)
        else:
            left, right = room - room // 2, room // 2
        kept, other = (first[:left], second[:right]) if over else (first, second)
    row = [special.cls, *kept, special.sep, *((*other, special.sep) if second is not None else ())]
    segments = np.zeros(len(row), np.uint8)
    segments[len(kept) + 2 :] = 1
    return np.array(row, np.int32), segments, len(kept) + len(other) < len(first) + len(second or ())


def _scores_of(train: Reading[ClassificationExample], fixed: tuple[str, ...]) -> Labels:
    """Labels of regression. Scores are trained in units of their standard deviation, or of the range that the task fixes."""
    scores = np.array([example.label for example in train.examples], np.float64)
    if fixed:
        low, high = map(float, fixed)
        return Labels((), "number", scale=high - low, shift=low)
    spread = float(scores.std())
    if spread == 0:
        raise DataError(
            f"every score of {train.source} is {scores[0]:g}: there is nothing to learn", hint="check the column: --label COLUMN"
        )
    return Labels((), "number", scale=spread, shift=float(scores.mean()))


def _named(names: Sequence[str], values: NDArray[np.float64]) -> dict[str, float]:
    return {name: round(float(value), 6) for name, value in zip(names, values, strict=True)}


def _numerically(name: str) -> tuple[int, float, str]:
    """Sort key that puts numeric labels first, in numeric order."""
    try:
        return (0, float(name), name)
    except ValueError:
        return (1, 0.0, name)
