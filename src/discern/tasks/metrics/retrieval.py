"""Metrics of retrieval, means over the queries, from the ranks of the relevant documents.

Recall at k: the fraction of a query's relevant documents among the first k. MRR: the reciprocal rank of the first one. nDCG at
10: the sum of grade / log2(rank + 1) over the first ten, divided by its largest possible value, as in trec_eval and BEIR.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from discern.errors import DataError
from discern.tasks.metrics import Scores

_CUTOFF = 10
_RECALLS = (1, 5, 10, 100)
RETRIEVAL_METRICS = ("ndcg_at_10", "mrr", *(f"recall_at_{cutoff}" for cutoff in _RECALLS))


@dataclass(frozen=True, slots=True)
class Ranking:
    """Where the relevant documents of a query rank.

    Attributes:
        ranks: rank of each of them, from 1.
        grades: how relevant each of them is, above 0.
    """

    ranks: tuple[int, ...]
    grades: tuple[float, ...]


def retrieval_scores(rankings: Sequence[Ranking]) -> Scores:
    """The metrics of `RETRIEVAL_METRICS`.

    Raises:
        DataError: there are no queries.
    """
    if not rankings:
        raise DataError("there are no queries to score", hint="give a file with at least one pair")
    count = len(rankings)
    values = {"ndcg_at_10": sum(map(_ndcg, rankings)) / count, "mrr": sum(1 / min(each.ranks) for each in rankings) / count}
    for cutoff in _RECALLS:
        found = (sum(rank <= cutoff for rank in each.ranks) / len(each.ranks) for each in rankings)
        values[f"recall_at_{cutoff}"] = sum(found) / count
    return Scores(values)


def _ndcg(ranking: Ranking) -> float:
    gained = sum(
        grade / math.log2(rank + 1) for rank, grade in zip(ranking.ranks, ranking.grades, strict=True) if rank <= _CUTOFF
    )
    best = sorted(ranking.grades, reverse=True)[:_CUTOFF]
    return gained / sum(grade / math.log2(rank + 1) for rank, grade in enumerate(best, start=1))
