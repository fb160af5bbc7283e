"""An encoder with its head, as objectives, evaluation, export and the model card see it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from discern.model.encoder import Encoder
from discern.model.heads import BilinearTerm


@dataclass(frozen=True)
class Network:
    """One of an objective's networks.

    Attributes:
        encoder: ids to hidden states.
        head: what stands on it.
        bilinear: an addition to the logits of a discriminator's head, or None.
        companions: what is trained along with it and only serves training; not exported.
    """

    encoder: Encoder
    head: nn.Module
    bilinear: BilinearTerm | None = None
    companions: tuple[nn.Module, ...] = ()

    def token_logits(
        self, input_ids: Int[Tensor, "B L"], *context: Bool[Tensor, "B L"] | Int[Tensor, "B L"] | None
    ) -> Float[Tensor, "B L *V"]:
        """The head's logits at every position; `context` is the encoder's further arguments, mask first."""
        return self.logits_of(self.encoder(input_ids, *context), input_ids)

    def logits_of(self, hidden: Float[Tensor, "B L D"], input_ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L *V"]:
        """The head's logits at the encoder's states of these ids."""
        logits: Tensor = self.head(hidden)
        if self.bilinear is not None:
            logits = logits + self.bilinear(hidden, self.encoder.embeddings.words(input_ids))
        return logits

    def parts(self) -> list[nn.Module]:
        """Everything it consists of."""
        parts = [self.encoder, self.head, self.bilinear, *self.companions]
        return [part for part in parts if part is not None]

    def trained(self) -> set[Parameter]:
        """The parameters that move when this network is trained; not what it reads of another without sending gradient back."""
        held = {parameter for part in self.parts() for parameter in part.parameters()}
        return held - set(self.encoder.embeddings.borrowed())
