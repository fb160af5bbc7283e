"""An encoder with its head, as objectives, evaluation, export and the model card see it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from discern.model.encoder import Encoder
from discern.model.heads import BilinearTerm


@dataclass(frozen=True)
class Network:
    """One of an objective's networks.

    Attributes:
        encoder: ids to hidden states.
        head: what stands on it.
        bilinear: an addition to the logits of a discriminator's head, or None.
    """

    encoder: Encoder
    head: nn.Module
    bilinear: BilinearTerm | None = None

    def token_logits(
        self, input_ids: Int[Tensor, "B L"], *context: Bool[Tensor, "B L"] | Int[Tensor, "B L"] | None
    ) -> Float[Tensor, "B L *V"]:
        """The head's logits at every position; `context` is the encoder's further arguments, mask first."""
        hidden = self.encoder(input_ids, *context)
        logits: Tensor = self.head(hidden)
        if self.bilinear is not None:
            logits = logits + self.bilinear(hidden, self.encoder.embeddings.words(input_ids))
        return logits
