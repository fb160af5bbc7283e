"""Text embeddings, trained by contrast: the vector of a text is to be close to those of texts with the same meaning.

The task is named `pairs`, after its files. (A head that compares two texts in order to classify them is in pairs.py.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import Tensor

from discern.data.tables import open_table
from discern.errors import ConfigError, DataError
from discern.models.base import Encoder
from discern.models.config import ModelConfig
from discern.models.heads import mean_state
from discern.tasks.base import (
    Definition,
    Labels,
    Layout,
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
    TextGroup,
)
from discern.tasks.baselines import Baseline
from discern.tasks.features import Features, Ragged, TaskRows
from discern.tasks.metrics import number_scores
from discern.tasks.readers.text_groups import group_columns, is_retrieval, read_groups, read_retrieval
from discern.types import TokenBatch

NAME = "pairs"
SIMILARITY_METRICS = ("spearman", "pearson")
# Queries whose similarities with all documents are held in memory at a time.
_QUERIES = 256
_RECALLS = (1, 5, 10, 100)
RETRIEVAL_METRICS = ("ndcg_at_10", "mrr", *(f"recall_at_{cutoff}" for cutoff in _RECALLS))
# A step compares each anchor with the positives of all rows.
_ROWS_PER_STEP = 64
# Few pairs are soon learned: of 316 pairs, nDCG after 117 of 247 steps was within 0.002 of its best (benchmarks/records,
# "embeddings").
_MIN_STEPS = 150
# Of texts alone, whose two vectors differ by nothing else. Gao et al. 2021, "SimCSE", table 2: 0.1 is best.
_DROPOUT = 0.1
_TFIDF_FEATURES = 100_000


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
            hidden, mask = hidden[:, 1:-1], mask[:, 2:]  # a row is [CLS] text [SEP]: the token after a token of the text is real
        return mean_state(hidden, mask).float()

    def forward(self, hidden: Float[Tensor, "R L D"], tokens: TokenBatch, rows: TaskRows) -> LossAndOutputs:
        return None, {"vectors": self.pooled(hidden, tokens.attention_mask)[:, None]}


class Contrastive(Task[TextGroup]):
    """Pairs of texts, with further negatives if there are any, trained with InfoNCE; or judged pairs, trained with CoSENT.

    Evaluated by the rank correlation of cosines with judged similarities; or by retrieval: each anchor searches its positive
    among all texts of the file, or each query its relevant documents.
    """

    Config = ContrastiveConfig
    config: ContrastiveConfig
    family = NAME
    objective = "discern.tasks.contrastive_objective:ContrastiveObjective"

    @classmethod
    def learn(cls, train: Reading[TextGroup], config: TaskConfig, fixed: tuple[str, ...]) -> Labels:
        if len({example.texts[:2] for example in train.examples}) < 2:
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
    def check_model(
        cls, definition: Definition[TextGroup], config: TaskConfig, encoder: Encoder, *, dropout: float, frame: str
    ) -> None:
        settings, width = cast(ContrastiveConfig, config), encoder.config.hidden_size
        if definition.layout.kind == "texts" and settings.positives == "dropout" and not dropout:
            raise ConfigError(
                "finetune.dropout is 0, but training on single texts encodes each text twice, with different dropout",
                hint="--set finetune.dropout=0.1, or --set task.positives=crop for paragraphs of text",
            )
        if settings.matryoshka and max(settings.matryoshka) > width:
            raise ConfigError(
                f"task.matryoshka has size {max(settings.matryoshka)}, but the vectors of this model have {width} components",
                hint=f"give smaller sizes: --set 'task.matryoshka=[{width // 2}]'",
            )
        usual = encoder.fine_tuning.get("finetune.frame", "cls-first")
        if frame != usual:  # the encoder is later used without the record of its fine-tuning
            raise ConfigError(
                f"finetune.frame is '{frame}', but vectors of this encoder are read in its own framing, '{usual}'",
                hint="leave it out",
            )

    @classmethod
    def read(
        cls, path: Path, definition: Definition[TextGroup], split: str, config: TaskConfig, *, labeled: bool = True
    ) -> Reading[TextGroup]:
        settings, layout = cast(ContrastiveConfig, config), definition.layout
        if is_retrieval(path):
            return read_retrieval(path, settings.unjudged)
        training = split == "train"
        named = {role: names[0] for role, names in layout.columns.items()}
        positive_score = settings.positive_score if training else None
        return read_groups(path, named, training=training, format=layout.format, positive_score=positive_score)

    def encode(self, examples: Sequence[TextGroup], text: TextEncoder, *, labeled: bool) -> Features:
        texts = [content for example in examples for content in example.texts]
        max_tokens, num_cut = self.config.sequence_length - 2, 0
        framed: list[NDArray[np.int32]] = []
        for tokens in text.ids(texts):
            num_cut += len(tokens) > max_tokens
            framed.append(np.array([text.special.cls, *tokens[:max_tokens], text.special.sep], np.int32))
        notes = (f"{num_cut:,} of {len(texts):,} texts were cut to {self.config.sequence_length} tokens",) if num_cut else ()

        # A row has the texts of an example; the segment of a token is the number of its text.
        counts = [len(example.texts) for example in examples]
        by_text = Ragged.of(framed)
        offsets = by_text.offsets[np.cumsum([0, *counts])]
        numbers = np.concatenate([np.arange(count, dtype=np.int16) for count in counts])
        segments = Ragged(np.repeat(numbers, by_text.lengths), offsets)

        # Equal texts have equal keys; 0 is for a text that a row does not have.
        known: dict[str, int] = {}
        keys = np.zeros((len(examples), max(counts)), np.int64)
        keys[np.repeat(np.arange(len(examples)), counts), numbers] = [
            known.setdefault(content, len(known) + 1) for content in texts
        ]
        targets = {"texts": keys}
        if examples[0].score is not None:
            targets["score"] = np.array([example.score for example in examples], np.float32)
        return Features(Ragged(by_text.values, offsets), segments, np.arange(len(examples)), targets, notes=notes)

    def head(self, encoder: ModelConfig, dropout: float) -> VectorHead:
        return VectorHead(self.config.pooling)

    def predict(self, examples: Sequence[TextGroup], features: Features, outputs: Outputs) -> list[Prediction]:
        vectors = [row["vectors"][: len(example.texts)] for example, row in zip(examples, outputs, strict=True)]
        return self.compare(examples, np.concatenate(vectors))

    def compare(self, examples: Sequence[TextGroup], vectors: Any) -> list[Prediction]:
        """Predictions from the vectors of the texts: similarities of judged pairs, or ranks of what is searched for.

        Args:
            vectors: (T, D) vectors of the texts of all examples, one after another; dense or sparse.
        """
        if examples[0].score is None:
            return search(examples, vectors)
        first, second = vectors[::2], vectors[1::2]
        lengths = np.sqrt((first * first).sum(1) * (second * second).sum(1))
        cosines = (first * second).sum(1) / np.where(lengths > 0, lengths, 1)
        return [
            {"id": example.id, "similarity": round(float(cosine), 6)} for example, cosine in zip(examples, cosines, strict=True)
        ]

    def score(self, examples: Sequence[TextGroup], predictions: Predictions) -> Scores:
        gold = [example.score for example in examples if example.score is not None]
        if not gold:
            return retrieval_scores(predictions)
        return number_scores(gold, [prediction["similarity"] for prediction in predictions], SIMILARITY_METRICS)

    def metric_terms(self, metric: str, examples: Sequence[TextGroup], predictions: Predictions) -> NDArray[np.float64] | None:
        if "ranks" not in predictions[0]:
            return None
        # One prediction per query, whereas the examples of a folder contain the documents too.
        return np.array([(self.score((), [each]).values[metric], 1) for each in predictions], np.float64)

    def mistakes(self, examples: Sequence[TextGroup], predictions: Predictions) -> list[dict[str, Any]]:
        if examples[0].score is None:
            records = [
                {**prediction, "badness": prediction["ranks"][0]} for prediction in predictions if prediction["ranks"][0] > 1
            ]
        else:
            # How far the order of the similarities is from the order of the scores.
            pairs = np.array(
                [(prediction["similarity"], example.score) for prediction, example in zip(predictions, examples, strict=True)]
            )
            positions = pairs.argsort(0).argsort(0)
            gaps = (np.abs(positions[:, 0] - positions[:, 1]) / max(len(examples) - 1, 1)).round(6).tolist()
            records = [
                {**prediction, "text": example.text, "pair": example.texts[1], "gold": example.score, "badness": gap}
                for example, prediction, gap in zip(examples, predictions, gaps, strict=True)
                if gap > 0
            ]
        return sorted(records, key=lambda record: -record["badness"])

    def failure(self, examples: Sequence[TextGroup], predictions: Predictions) -> str | None:
        similarities = [prediction["similarity"] for prediction in predictions if "similarity" in prediction]
        if len(similarities) > 1 and np.ptp(similarities) < 1e-6:
            return f"every pair of texts has similarity {similarities[0]:.4f}: all vectors are the same"
        return None

    def baselines(self) -> Sequence[Baseline[TextGroup]]:
        return [Baseline("tfidf", "TF-IDF vectors", self._compare_tfidf)]

    def _compare_tfidf(self, train: Sequence[TextGroup], examples: Sequence[TextGroup]) -> list[Prediction]:
        """TF-IDF of words and of character n-grams, fitted on the training texts and compared as the vectors of the network."""
        # They take a second to import.
        from scipy import sparse
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.pipeline import make_union

        vectorizer = make_union(
            TfidfVectorizer(token_pattern=r"(?u)\b\w+\b", sublinear_tf=True, max_features=_TFIDF_FEATURES),
            TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4), sublinear_tf=True, max_features=_TFIDF_FEATURES),
        )
        vectorizer.fit([text for example in train for text in example.texts])
        vectors = vectorizer.transform([text for example in examples for text in example.texts])
        return self.compare(examples, sparse.csr_array(vectors))


def pairs_definition(
    train: Path, dev: Path | None, columns: Mapping[str, str], format: str | None, settings: Mapping[str, object]
) -> Definition[TextGroup]:
    """The definition of the task `pairs` for a user's files.

    Args:
        train: table of pairs, or of single texts.
        dev: table of pairs, folder of queries and documents, or a file in its `qrels`; None: a part of the pairs is held out.
        columns: columns that the user named, by role.
        settings: the settings of `ContrastiveConfig` that the user gave, unchecked.

    Raises:
        ConfigError: the training file has no such column, a column cannot be recognized, or there are only single texts to
            evaluate on.
        DataError: a file cannot be read.
    """
    other = next((role for role in columns if role not in ("text", "pair", "label")), None)
    if other is not None:
        raise ConfigError(f"--{other} is not a column of pairs", hint="--text ANCHOR --pair POSITIVE --label SCORE")
    if is_retrieval(train):
        raise ConfigError(
            f"{train} has queries and documents, which can only be evaluated on", hint="train on a table of pairs: --train FILE"
        )
    table = open_table(train, format)
    # A file to evaluate on may have other columns than those named.
    for role, column in columns.items():
        table.require(column, f"--{role}")
    if "pair" in columns and "text" not in columns:
        raise ConfigError(
            f"--pair {columns['pair']} is the second text of a pair, but the first is not named", hint="add --text COLUMN"
        )
    _, positive, score = group_columns(table, columns)
    if positive is None and dev is None:
        raise ConfigError(
            f"{train} has single texts rather than pairs, so none of it can be held out to evaluate on",
            hint="--dev FILE: judged pairs (sentence1, sentence2, score), pairs (anchor, positive), or a folder of queries; if "
            "these are pairs, name both texts: --text COLUMN --pair COLUMN",
        )
    crops = settings.get("positives") == "crop"
    if positive is not None and crops:
        raise ConfigError(
            f"task.positives is 'crop', which is for single texts, but {train} has pairs",
            hint="leave it out, or train on a file with the single column 'text'",
        )
    if dev is None:  # what is held out keeps its scores unless they chose the positives
        judged = score is not None and settings.get("positive_score") is None
    else:
        judged = not is_retrieval(dev) and group_columns(open_table(dev, format), columns)[2] is not None
    defaults: dict[str, object] = {"train.sequences_per_step": _ROWS_PER_STEP, "finetune.min_steps": _MIN_STEPS}
    if positive is None and not crops:
        defaults["finetune.dropout"] = _DROPOUT
    layout = Layout({role: (name,) for role, name in columns.items()}, format, "texts" if positive is None else "pairs")
    metrics = SIMILARITY_METRICS if judged else RETRIEVAL_METRICS
    return Definition(NAME, Contrastive, metrics, layout=layout, defaults=defaults)


def search(examples: Sequence[TextGroup], vectors: Any) -> list[Prediction]:
    """Search each query among the documents, or each anchor among the positives and negatives of all rows.

    A document that is no nearer to the query than an irrelevant one ranks behind it: vectors that are all the same find nothing.

    Args:
        vectors: (T, D) vectors of the texts of all examples, one after another; dense or sparse.

    Returns:
        For each query, the `ranks` of its relevant documents from 1, their `grades`, and the text that was `found` first.
    """
    # They take a second to import.
    from sklearn.preprocessing import normalize
    from sklearn.utils.extmath import safe_sparse_dot

    # Each query with the row of its vector and the grades of its relevant documents; each document with its row.
    queries: dict[str, tuple[TextGroup, int, dict[str, float]]] = {}
    documents: dict[str, tuple[str, int]] = {}
    row = 0
    for example in examples:
        if example.relevant is not None:
            queries[example.id] = example, row, dict(example.relevant)
        elif len(example.texts) == 1:
            documents[example.id] = example.text, row
        else:
            # The key of a text is the text: equal texts are one document, and equal anchors one query with all their positives.
            _, _, grades = queries.setdefault(example.text, (example, row, {}))
            grades[example.texts[1]] = 1.0
            for document_row, text in enumerate(example.texts[1:], row + 1):
                documents.setdefault(text, (text, document_row))
        row += len(example.texts)

    numbers = {key: number for number, key in enumerate(documents)}
    texts, rows = zip(*documents.values(), strict=True)
    vectors = normalize(vectors)
    document_vectors = vectors[list(rows)]
    predictions: list[Prediction] = []
    for first in range(0, len(queries), _QUERIES):
        block = list(queries.items())[first : first + _QUERIES]
        block_vectors = vectors[[row for _, (_, row, _) in block]]
        cosines = safe_sparse_dot(block_vectors, document_vectors.T, dense_output=True)
        for (key, (example, _, grades)), similarities in zip(block, cosines, strict=True):
            if key in numbers and key not in grades:
                similarities[numbers[key]] = -np.inf  # as in BEIR, the query itself is not found, unless it is judged
            relevant = [numbers[document] for document in grades]
            others = np.delete(similarities, relevant)
            ranked = sorted(zip(similarities[relevant], grades.values(), strict=True), key=lambda pair: -pair[0])
            predictions.append(
                {
                    "id": example.id,
                    "text": example.text,
                    # The k-th nearest relevant document has k - 1 relevant ones before it.
                    "ranks": [
                        int((others >= similarity).sum()) + before for before, (similarity, _) in enumerate(ranked, start=1)
                    ],
                    "grades": [grade for _, grade in ranked],
                    "found": texts[int(similarities.argmax())],
                    "gold": [texts[number] for number in relevant[:3]],
                }
            )
    return predictions


def retrieval_scores(predictions: Sequence[Mapping[str, Any]]) -> Scores:
    """The metrics of `RETRIEVAL_METRICS`, from what `search` returned: means over the queries.

    Recall at k: the fraction of a query's relevant documents among the first k. MRR: the reciprocal rank of the first one. nDCG
    at 10: the sum of grade / log2(rank + 1) over the first ten, divided by its largest possible value, as in trec_eval and BEIR.
    """
    count, ranks = len(predictions), [prediction["ranks"] for prediction in predictions]
    gains = (
        _gain(prediction["ranks"], prediction["grades"]) / _gain(itertools.count(1), sorted(prediction["grades"], reverse=True))
        for prediction in predictions
    )
    values = {"ndcg_at_10": sum(gains) / count, "mrr": sum(1 / first for first, *_ in ranks) / count}
    for cutoff in _RECALLS:
        values[f"recall_at_{cutoff}"] = (
            sum(sum(rank <= cutoff for rank in of_query) / len(of_query) for of_query in ranks) / count
        )
    return Scores(values)


def _gain(ranks: Iterable[int], grades: Sequence[float]) -> float:
    """The discounted cumulative gain at 10."""
    return sum(grade / math.log2(rank + 1) for rank, grade in zip(ranks, grades, strict=False) if rank <= 10)
