"""Retrieval within a file: where the relevant documents of each query rank, and metrics of these ranks.

The metrics are means over the queries. Recall at k: the fraction of a query's relevant documents among the first k. MRR: the
reciprocal rank of the first one. nDCG at 10: the sum of grade / log2(rank + 1) over the first ten, divided by its largest
possible value, as in trec_eval and BEIR.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from discern.tasks.base import Prediction, Scores, TextGroup

# Queries whose similarities with all documents are held in memory at a time.
_QUERIES = 256
_RECALLS = (1, 5, 10, 100)
RETRIEVAL_METRICS = ("ndcg_at_10", "mrr", *(f"recall_at_{cutoff}" for cutoff in _RECALLS))


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
    """The metrics of `RETRIEVAL_METRICS`, from what `search` returned."""
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
