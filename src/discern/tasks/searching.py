"""Retrieval within a file: which texts are searched for which, and where the relevant ones rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from discern.tasks.examples import TextGroup

# Queries whose similarities with all documents are held in memory at a time.
_QUERIES = 256


@dataclass(frozen=True)
class Searched:
    """Q queries and the N documents that they are searched in.

    Attributes:
        ids: id of each query.
        queries: its text.
        documents: text of each document.
        relevant: numbers of the documents that are relevant for each query, at least one.
        grades: their grades.
        same: numbers of documents that are the query itself, which are not found.
        query_vectors: vector of each query.
        document_vectors: vector of each document.
    """

    ids: list[str]
    queries: list[str]
    documents: list[str]
    relevant: list[list[int]]
    grades: list[list[float]]
    same: list[list[int]]
    query_vectors: list[Any]
    document_vectors: list[Any]


def searched(examples: Sequence[TextGroup], vectors: Sequence[Any]) -> Searched:
    """What is searched in a file: anchors among all positives and negatives, or queries among documents.

    Equal texts are one document, and equal anchors have the positives of all of them.

    Args:
        vectors: vectors of the texts of each example.
    """
    if any(example.relevant is not None for example in examples):
        return _judged(examples, vectors)
    numbers: dict[str, int] = {}
    found: list[Any] = []
    for example, row in zip(examples, vectors, strict=True):
        for place, text in enumerate(example.texts[1:], start=1):
            if text not in numbers:
                numbers[text] = len(numbers)
                found.append(row[place])
    positives: dict[str, dict[int, None]] = {}
    for example in examples:
        positives.setdefault(example.text, {})[numbers[example.texts[1]]] = None
    anchors = {example.text: (example.id, row[0]) for example, row in reversed(list(zip(examples, vectors, strict=True)))}
    queries = list(positives)
    return Searched(
        ids=[anchors[text][0] for text in queries],
        queries=queries,
        documents=list(numbers),
        relevant=[list(positives[text]) for text in queries],
        grades=[[1.0] * len(positives[text]) for text in queries],
        same=[[numbers[text]] if text in numbers and numbers[text] not in positives[text] else [] for text in queries],
        query_vectors=[anchors[text][1] for text in queries],
        document_vectors=found,
    )


def _judged(examples: Sequence[TextGroup], vectors: Sequence[Any]) -> Searched:
    numbers: dict[str, int] = {}
    documents, found = [], []
    for example, row in zip(examples, vectors, strict=True):
        if example.relevant is None:
            numbers[example.id] = len(numbers)
            documents.append(example.text)
            found.append(row[0])
    asked = [(example, row[0]) for example, row in zip(examples, vectors, strict=True) if example.relevant is not None]
    judged = [[(numbers[name], grade) for name, grade in example.relevant or ()] for example, _ in asked]
    return Searched(
        ids=[example.id for example, _ in asked],
        queries=[example.text for example, _ in asked],
        documents=documents,
        relevant=[[number for number, _ in each] for each in judged],
        grades=[[grade for _, grade in each] for each in judged],
        # As in BEIR: a document with the id of the query is the query itself, unless it is judged.
        same=[
            [numbers[example.id]] if example.id in numbers and example.id not in dict(example.relevant or ()) else []
            for example, _ in asked
        ],
        query_vectors=[row for _, row in asked],
        document_vectors=found,
    )


def ranked(search: Searched) -> Iterator[Mapping[str, Any]]:
    """For each query, in order: `ranks` of its relevant documents from 1, their `grades`, and the text that was `found` first.

    A document that is no nearer to the query than an irrelevant one ranks behind it: vectors that are all the same find nothing.
    """
    documents = _unit(search.document_vectors)
    for first in range(0, len(search.queries), _QUERIES):
        block = _unit(search.query_vectors[first : first + _QUERIES])
        products = block @ documents.T
        similarities = np.asarray(products.todense() if hasattr(products, "todense") else products)
        for row, near in enumerate(similarities):
            number = first + row
            near[search.same[number]] = -np.inf
            relevant = np.array(search.relevant[number])
            own = near[relevant]
            others = near.copy()
            others[relevant] = -np.inf
            order = np.argsort(-own, kind="stable")
            # The k-th nearest relevant document has k - 1 relevant ones before it.
            ranks = [int((others >= own[place]).sum()) + before for before, place in enumerate(order, start=1)]
            grades = [search.grades[number][place] for place in order]
            yield {"ranks": ranks, "grades": grades, "found": search.documents[int(near.argmax())]}


def _unit(rows: Sequence[Any]) -> Any:
    """The vectors as the rows of a matrix, each of length 1 or 0; sparse if they are."""
    if rows and hasattr(rows[0], "tocsr"):
        from scipy import sparse
        from sklearn.preprocessing import normalize

        return normalize(sparse.vstack(rows).tocsr())
    matrix = np.stack(rows).astype(np.float32)
    lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
    return matrix / np.where(lengths > 0, lengths, 1)
