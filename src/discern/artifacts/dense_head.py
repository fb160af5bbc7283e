"""A head that was fitted for an export, in place of one that transformers has no class for."""

from __future__ import annotations

from dataclasses import dataclass

from discern.models.heads import ReplacedTokenHead


@dataclass(frozen=True)
class DenseHead:
    """A dense head for a discriminator with a bilinear term, and what it costs.

    Attributes:
        head: the head, on the CPU.
        auc: AUC of the discriminator with it on held-out text; chance that a replaced token gets a higher logit than an original.
        auc_with_term: AUC with the head that was trained, bilinear term included.
        updates: number of updates that fitted it.
    """

    head: ReplacedTokenHead
    auc: float
    auc_with_term: float
    updates: int
