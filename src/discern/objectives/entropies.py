"""A running mean of the entropy of the generator's predictions, by original token: the weights of masking 'entropy'."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from discern.objectives.losses import WordLogits
from discern.types import Places

_DECAY = 0.99
_PART = 1 << 20
"""Number of logits that are computed at once on a processor."""


class TokenEntropies:
    """The mean entropy e_v of the predictions of each token id v, in nats: an exponential moving average over its predictions.

    A step that predicts v at c positions, with mean entropy m, changes e_v to d^c e_v + (1 - d^c) m, with d = 0.99. All e_v
    begin at ln V, the entropy of a uniform distribution, so a token that has not been predicted yet counts as uncertain.

    The masks of a step are drawn while the step before it is computed. They use the values of two steps before, and those of
    the first two steps no values, so that they do not depend on timing. Both versions are part of the checkpoint.

    Args:
        size: V.
    """

    PREFIX: ClassVar[str] = "token_entropies."

    def __init__(self, size: int) -> None:
        self._newest = torch.full((size,), math.log(size), dtype=torch.float64)
        self._by_step: dict[int, _Copied] = {}

    def at(self, step: int) -> Float[Tensor, "V"] | None:
        """The values for the masks of a step: of this step or the next one while training; None: no values."""
        copied = self._by_step.get(step)
        # Values without numbers, on the meta device, are unknown.
        return None if copied is None or copied.is_meta else copied.values()

    def sums(self, logits: WordLogits, targets: Int[Tensor, "N"], places: Places) -> Float[Tensor, "2 V"]:
        """`entropy_sums` of the predictions at some positions."""
        return entropy_sums(logits.map(entropies_of), targets, len(self._newest), places.draws)

    def update(self, step: int, sums: Float[Tensor, "2 V"]) -> None:
        """Add the predictions of a step.

        Args:
            sums: result of `entropy_sums` over all positions of the step.
        """
        entropies, counts = sums.double()
        kept = _DECAY**counts
        newest = self._newest.to(sums.device, non_blocking=True)
        self._newest = kept * newest + (1 - kept) * entropies / counts.clamp(min=1)
        before = {number: values for number, values in self._by_step.items() if number == step + 1}
        # A new dictionary: another thread may be reading the old one.
        self._by_step = before | {step + 2: _Copied(self._newest)}

    def state(self) -> dict[str, Tensor]:
        """Values to save with the checkpoint, by name."""
        return {f"{self.PREFIX}{step}": copied.values() for step, copied in self._by_step.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of `state`.

        Raises:
            ValueError: a name or a shape does not belong to it.
        """
        shape = tuple(self._newest.shape)
        for name, values in state.items():
            if not name.startswith(self.PREFIX) or tuple(values.shape) != shape:
                raise ValueError(f"'{name}' of shape {tuple(values.shape)} is not the entropies of {shape[0]} tokens")
        self._by_step = {int(name.removeprefix(self.PREFIX)): _Copied(values) for name, values in state.items()}
        if self._by_step:
            self._newest = self._by_step[max(self._by_step)].values()


class _Copied:
    """Values on the host, to which a GPU copies them while the host goes on.

    Only the thread that asks for them waits: the one that reads rows, two steps later.
    """

    def __init__(self, values: Tensor) -> None:
        self._values, self._ready = values, None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    @property
    def is_meta(self) -> bool:
        return self._values.is_meta

    def values(self) -> Tensor:
        """The values, once they have arrived."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._values


@torch.no_grad()
def entropy_sums(
    entropies: Float[Tensor, "N"], targets: Int[Tensor, "N"], vocab_size: int, draws: Int[Tensor, "N"] | None = None
) -> Float[Tensor, "2 V"]:
    """Sum of the entropies of the predictions of each token id, in nats, and their number, float64.

    Args:
        draws: 0 for a prediction that does not count; None: all of them do.
    """
    counted = torch.ones_like(entropies, dtype=torch.float64) if draws is None else (draws > 0).double()
    sums = torch.zeros(2, vocab_size, dtype=torch.float64, device=entropies.device)
    return sums.index_add(1, targets, torch.stack([entropies.double() * counted, counted]))


def entropies_of(logits: Float[Tensor, "N V"]) -> Float[Tensor, "N"]:
    """`entropy_of`, a few rows at a time."""
    # In parts that fit into the cache of a processor, as the exponentials are as large as the logits.
    rows = max(1, (_PART if logits.device.type == "cpu" else 64 * _PART) // logits.shape[1])
    return torch.cat([entropy_of(part) for part in torch.split(logits, rows)])


def entropy_of(logits: Float[Tensor, "N V"]) -> Float[Tensor, "N"]:
    """The entropy of each softmax, in nats, float32: ln Z - E[logit], with a third of the work of p ln p."""
    logits = logits.float()
    logits = logits - logits.amax(-1, keepdim=True)
    exponentials = logits.exp()
    total = exponentials.sum(-1)
    return (total.log() - (exponentials * logits).sum(-1) / total).clamp(min=0)
