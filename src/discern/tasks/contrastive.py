"""Text embeddings, trained by contrast: the vector of a text is to be close to those of texts with the same meaning.

The task is named `pairs`, after its files. (A head that compares two texts in order to classify them is in pairs.py.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor

from discern.errors import ConfigError, DataError
from discern.models.config import ModelConfig
from discern.tasks.base import Labels, Outputs, Prediction, Task, TaskConfig, TaskHead, TextEncoder
from discern.tasks.contrastive_loss import ABSENT, text_key
from discern.tasks.examples import Reading, TextGroup
from discern.tasks.features import Features, Ragged, TaskRows
from discern.tasks.metrics import Scores
from discern.tasks.metrics.retrieval import RETRIEVAL_METRICS, Ranking, retrieval_scores
from discern.tasks.pairs import mean_state
from discern.tasks.searching import Searched, ranked, searched
from discern.types import TokenBatch

if TYPE_CHECKING:
    from discern.tasks.baselines.base import Baseline

NAME = "pairs"
SIMILARITY_METRICS = ("spearman", "pearson")
_BLOCK = 10_000
_MAX_TEXTS = 255
_COLLAPSED = 1e-6


class ContrastiveConfig(TaskConfig):
    """Settings of contrastive training."""

    pooling: Literal["mean-all", "mean", "cls"] = Field(
        "mean-all",
        description="How the vector of a text is computed. 'mean-all': the mean of the states of all its tokens, [CLS] and [SEP] "
        "included, the only mean that other servers have. 'mean': without these two. 'cls': the state of [CLS].",
    )
    positives: Literal["dropout", "crop"] = Field(
        "dropout",
        description="For a training file of single texts: what the two texts of a pair are. 'dropout': the same text twice, with "
        "different dropout (SimCSE). 'crop': two random spans of the text, each a tenth to a half of it, drawn again in every "
        "pass (Contriever); the texts should be paragraphs rather than sentences.",
    )
    temperature: float = Field(0.05, gt=0, description="Divisor of the cosines in the softmax. SimCSE: 0.05.")
    symmetric: bool = Field(
        False, description="Train in both directions: each anchor to find its positive, and each positive to find its anchor."
    )
    matryoshka: tuple[PositiveInt, ...] = Field(
        (), description="Smaller sizes at which a vector can be cut off and still be used, such as [64, 32]; each is trained too."
    )
    texts_per_pass: int = Field(
        0,
        ge=0,
        description="Number of texts encoded at a time (gradient caching): memory then does not depend on "
        "train.sequences_per_step, and a step takes about a third longer. 0: all at once.",
    )
    positive_score: float | None = Field(
        None,
        description="For a training file with a column of scores: pairs with at least this score are positives (InfoNCE), the "
        "others are left out (default: all pairs are trained on, so that their cosines are in the order of the scores; CoSENT).",
    )
    unjudged: Literal["refuse", "leave-out"] = Field(
        "refuse", description="What to do with queries that have no relevant document, in a folder of queries and documents."
    )


class VectorHead(TaskHead):
    """The vector of a text from its hidden states. It has no parameters.

    Args:
        pooling: 'mean-all', 'mean' or 'cls'.
    """

    def __init__(self, pooling: str) -> None:
        super().__init__()
        self.pooling = pooling

    def pooled(self, hidden: Float[Tensor, "T L D"], mask: Bool[Tensor, "T L"]) -> Float[Tensor, "T D"]:
        """The vector of each text, in float32; zeros for the mean of a text without tokens."""
        if self.pooling == "cls":
            return hidden[:, 0].float()
        if self.pooling == "mean":
            places = torch.arange(mask.shape[1], device=mask.device)
            mask = (places > 0) & (places < mask.sum(1, keepdim=True) - 1)  # a row is [CLS] text [SEP]
        return mean_state(hidden, mask).float()

    def forward(
        self, hidden: Float[Tensor, "R L D"], tokens: TokenBatch, rows: TaskRows
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        return None, {"vectors": self.pooled(hidden, tokens.attention_mask)[:, None].detach()}


class Contrastive(Task[TextGroup]):
    """Pairs of texts, with further negatives if there are any, trained with InfoNCE; or judged pairs, trained with CoSENT.

    Evaluated by the rank correlation of cosines with judged similarities; or by retrieval: each anchor searches its positive
    among all texts of the file, or each query its relevant documents.
    """

    Config: ClassVar[type[TaskConfig]] = ContrastiveConfig
    family: ClassVar[str] = NAME
    objective: ClassVar[str] = "discern.tasks.contrastive_objective:ContrastiveObjective"
    own_frame: ClassVar[bool] = True

    @property
    def settings(self) -> ContrastiveConfig:
        """The settings, with their type."""
        return cast(ContrastiveConfig, self.config)

    @classmethod
    def learn(cls, train: Reading[TextGroup], config: TaskConfig, fixed: tuple[str, ...]) -> Labels:
        different = {example.texts[:2] for example in train.examples}
        if len(different) < 2:
            raise DataError(
                f"{train.source} has a single pair to learn from, but each pair is contrasted with the other pairs of its batch",
                hint="give at least two different pairs, preferably some hundreds",
            )
        scores = {example.score for example in train.examples}
        if len(scores) == 1 and None not in scores:
            raise DataError(
                f"all pairs of {train.source} have the score {train.examples[0].score:g}, so there is no order to learn",
                hint="give pairs of different similarity; for pairs that all belong together, remove the column of scores",
            )
        return Labels(kind="vectors", pairs=True)

    @classmethod
    def check_encoder(cls, config: TaskConfig, encoder: ModelConfig) -> None:
        sizes = cast(ContrastiveConfig, config).matryoshka
        if sizes and max(sizes) > encoder.hidden_size:
            raise ConfigError(
                f"task.matryoshka has size {max(sizes)}, but the vectors of this model have {encoder.hidden_size} components",
                hint=f"give smaller sizes: --set 'task.matryoshka=[{encoder.hidden_size // 2}]'",
            )

    def check(self, reading: Reading[TextGroup]) -> None:
        longest = max((len(example.texts) for example in reading.examples), default=0)
        if longest > _MAX_TEXTS:
            raise DataError(
                f"{reading.source} has {longest} texts in a row, at most {_MAX_TEXTS} are supported", hint="use fewer"
            )

    def encode(self, examples: Sequence[TextGroup], text: TextEncoder, *, labeled: bool) -> Features:
        ids: list[NDArray[np.int32]] = []
        types: list[NDArray[np.uint8]] = []
        room, cut = self.config.sequence_length - 2, 0
        for start in range(0, len(examples), _BLOCK):
            block = examples[start : start + _BLOCK]
            found = iter(text.ids([each for example in block for each in example.texts]))
            for example in block:
                rows = [next(found) for _ in example.texts]
                cut += sum(len(row) > room for row in rows)
                framed = [[text.special.cls, *row[:room], text.special.sep] for row in rows]
                ids.append(np.array([token for row in framed for token in row], np.int32))
                types.append(np.repeat(np.arange(len(framed), dtype=np.uint8), [len(row) for row in framed]))
        total = sum(len(example.texts) for example in examples)
        notes = (f"{cut:,} of {total:,} texts were cut to {self.config.sequence_length} tokens",) if cut else ()
        targets = _targets(examples) if labeled and examples else {}
        return Features(Ragged.of(ids), Ragged.of(types, np.uint8), np.arange(len(examples)), targets, notes=notes)

    def head(self, encoder: ModelConfig, dropout: float) -> VectorHead:
        return VectorHead(self.settings.pooling)

    def items(self, rows: TaskRows) -> int:
        return len(rows.rows)

    def predict(self, examples: Sequence[TextGroup], features: Features, outputs: Outputs) -> list[Prediction]:
        vectors = [row["vectors"][: len(example.texts)] for example, row in zip(examples, outputs, strict=True)]
        return self.compare(examples, vectors)

    def compare(self, examples: Sequence[TextGroup], vectors: Sequence[Any]) -> list[Prediction]:
        """Predictions from the vectors of the texts of each example: similarities of pairs, or ranks of what is searched for."""
        if any(example.score is not None or example.judged for example in examples):
            return [
                {"id": example.id, "similarity": round(_cosine(row[0], row[1]), 6)}
                for example, row in zip(examples, vectors, strict=True)
            ]
        search = searched(examples, vectors)
        return [_found(search, number, each) for number, each in enumerate(ranked(search))]

    def score(self, examples: Sequence[TextGroup], predictions: Sequence[Prediction]) -> Scores:
        gold = [example.score for example in examples if example.score is not None]
        if gold:
            from discern.tasks.metrics.classification import number_scores  # scikit-learn takes a second to import

            return number_scores(gold, [each["similarity"] for each in predictions], SIMILARITY_METRICS)
        return retrieval_scores([Ranking(tuple(each["ranks"]), tuple(each["grades"])) for each in predictions])

    def mistakes(self, examples: Sequence[TextGroup], predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for example, each in zip(examples, predictions, strict=False):
            if example.score is not None:
                found.append({**each, "text": example.text, "pair": example.texts[1], "gold": example.score})
        if found:
            return _by_order(found)
        missed = [each for each in predictions if min(each["ranks"]) > 1]
        return sorted(({**each, "badness": min(each["ranks"])} for each in missed), key=lambda record: -int(record["badness"]))

    def failure(self, examples: Sequence[TextGroup], predictions: Sequence[Prediction]) -> str | None:
        similarities = [each["similarity"] for each in predictions if "similarity" in each]
        if len(similarities) > 1 and max(similarities) - min(similarities) < _COLLAPSED:
            return f"every pair of texts has similarity {similarities[0]:.4f}: all vectors are the same"
        return None

    def baselines(self) -> Sequence[Baseline[TextGroup]]:
        from discern.tasks.baselines.vectors import TfIdfVectors

        return [TfIdfVectors(self)]


def headline_metrics(*, judged: bool) -> tuple[str, ...]:
    """The metrics of a file, the headline first.

    Args:
        judged: whether its pairs have scores.
    """
    return SIMILARITY_METRICS if judged else RETRIEVAL_METRICS


def _targets(examples: Sequence[TextGroup]) -> dict[str, NDArray[Any]]:
    """The scores of judged pairs, which may be the opposite of positives, or the keys of pairs; a query alone has neither."""
    if all(example.score is not None for example in examples):
        return {"score": np.array([example.score for example in examples], np.float32)}
    if all(len(example.texts) > 1 and example.score is None for example in examples):
        return {"texts": _keys(examples)}
    return {}


def _keys(examples: Sequence[TextGroup]) -> NDArray[np.int64]:
    """(N, K) the keys of the texts of each example, filled up with `ABSENT`."""
    table = np.full((len(examples), max(len(example.texts) for example in examples)), ABSENT, np.int64)
    for row, example in enumerate(examples):
        table[row, : len(example.texts)] = [text_key(text) for text in example.texts]
    return table


def _cosine(first: Any, second: Any) -> float:
    """The cosine of two vectors, dense or rows of a sparse matrix; 0 for a vector of zeros."""
    product, lengths = (first * second).sum(), np.sqrt((first * first).sum() * (second * second).sum())
    return float(product / lengths) if lengths else 0.0


def _found(search: Searched, number: int, ranking: Mapping[str, Any]) -> Prediction:
    found = {"id": search.ids[number], "text": search.queries[number], **ranking}
    return {**found, "gold": [search.documents[place] for place in search.relevant[number]][:3]}


def _by_order(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records by how far the order of their similarities is from the order of their scores."""
    places = [np.argsort(np.argsort([record[key] for record in records])) for key in ("similarity", "gold")]
    gaps = np.abs(places[0] - places[1]) / max(len(records) - 1, 1)
    worst = np.argsort(-gaps, kind="stable")
    return [{**records[int(row)], "badness": round(float(gaps[row]), 6)} for row in worst if gaps[row] > 0]
