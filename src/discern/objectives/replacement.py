"""What the objectives share whose generator fills the chosen positions with samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from jaxtyping import Bool, Int
from pydantic import Field
from torch import Tensor

from discern.corruption.randomness import Randomness
from discern.corruption.sampling import replace_positions, sample_tokens
from discern.model.config import ModelConfig
from discern.model.embeddings import DisentangledEmbeddings, Embeddings, TokenEmbeddings
from discern.model.heads import gather_positions
from discern.model.network import Network
from discern.objectives.config import MaskingConfig
from discern.objectives.losses import masked_token_loss
from discern.objectives.masked import sample_replacements
from discern.types import CorruptedBatch, LossTerm, TokenBatch


class ReplacementConfig(MaskingConfig):
    """Settings of a masked language model as generator. Defaults: ELECTRA-Small, table 6."""

    generator_size: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Width of the generator, a fraction of the encoder's. ELECTRA, table 6: 1/4 small and large, 1/3 base.",
    )
    generator_depth: float = Field(1.0, gt=0, le=1, description="Depth likewise. ELECTRA keeps the depth.")
    generator_weight: float = Field(1.0, ge=0, description="Factor of the generator's loss.")
    temperature: float = Field(1.0, gt=0, description="Divides the generator's logits before sampling, not in its loss.")


@dataclass(frozen=True)
class Replacement:
    """What a generator made of a batch.

    Attributes:
        term: its loss.
        corrupted_ids: (B, L) samples at the chosen positions, everything else as it was.
        is_replaced: (B, L) the id changed; a lucky sample counts as original.
        observations: for evaluation.
    """

    term: LossTerm
    corrupted_ids: Int[Tensor, "B L"]
    is_replaced: Bool[Tensor, "B L"]
    observations: dict[str, Tensor]


def replace_chosen(generator: Network, batch: CorruptedBatch, config: ReplacementConfig, randomness: Randomness) -> Replacement:
    """Run the generator once over the masked text: its loss and its samples come from the same logits, dropout on.

    Reference: Clark et al. 2020, section 2.
    """
    tokens, positions = batch.tokens, batch.masked_positions
    logits = generator.head(gather_positions(generator.encoder(batch.masked_ids, *context_of(tokens)), positions))
    targets = tokens.input_ids[positions]
    sample = partial(sample_tokens, temperature=config.temperature)
    sampled = sample_replacements(batch, logits.detach(), randomness, sample)
    corrupted_ids = replace_positions(tokens.input_ids, positions, sampled)
    is_replaced = corrupted_ids != tokens.input_ids
    observations = {
        "generator_logits": logits.detach(),
        "generator_targets": targets,
        "sampled_ids": sampled,
        "corrupted_ids": corrupted_ids,
        "is_replaced": is_replaced,
    }
    term = masked_token_loss(logits, targets, config.generator_weight, batch.target_draws)
    return Replacement(term, corrupted_ids, is_replaced, observations)


def context_of(tokens: TokenBatch) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None]:
    """What an encoder reads besides the ids."""
    return tokens.visible_mask, tokens.token_type_ids, tokens.position_ids, tokens.document_ids


def shared_embeddings(vocab_size: int, model: ModelConfig, small: ModelConfig, tying: str) -> tuple[TokenEmbeddings, Embeddings]:
    """What the encoder reads, and what the generator reads.

    Args:
        model: sizes of the encoder.
        small: sizes of the generator.
        tying: 'embeddings', 'token', 'none' or 'gradient-disentangled'.
    """
    if tying == "gradient-disentangled":
        own = Embeddings(vocab_size, model.embedding_size, small)
        return DisentangledEmbeddings(own, model), own
    return separate_embeddings(vocab_size, model, small, tying)


def separate_embeddings(vocab_size: int, model: ModelConfig, small: ModelConfig, tying: str) -> tuple[Embeddings, Embeddings]:
    """Likewise, where the encoder's own word table is needed: 'embeddings', 'token' or 'none'."""
    own = Embeddings(vocab_size, small.hidden_size if tying == "none" else model.embedding_size, small)
    if tying == "embeddings":
        return own, own
    read = Embeddings(vocab_size, model.embedding_size, model)
    if tying == "token":
        own.word = read.word
    return read, own
