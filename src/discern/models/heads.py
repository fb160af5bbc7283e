"""Heads: logits over the vocabulary, one number per token, such as the logit of *replaced*, and parts of the heads of tasks."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import Parameter

from discern.models.architecture import Predicts
from discern.models.config import ModelConfig
from discern.models.layers import Dropout, SumOfParts, linear_gelu, normalized, parts_flops
from discern.types import TokenBatch


def gather_positions(hidden: Float[Tensor, "B L D"], positions: Bool[Tensor, "B L"]) -> Float[Tensor, "M D"]:
    """Hidden states at the chosen positions, row by row; M = positions.sum()."""
    # By index rather than by mask: its backward pass is a copy of rows.
    return hidden.flatten(0, 1).index_select(0, positions.flatten().nonzero().flatten())


class TiedLMHead(nn.Module):
    """Logits over the vocabulary: product with the word embeddings, bias; no layer in between.

    Args:
        config: settings of the encoder.
        word_embeddings: tied output matrix, (V, D), as wide as the hidden states.

    Reference: Yang et al. 2019 (XLNet), released code.
    """

    predicts: ClassVar[Predicts] = "words"

    def __init__(self, config: ModelConfig, word_embeddings: nn.Embedding) -> None:
        super().__init__()
        self.input_size = word_embeddings.embedding_dim
        self.word_embeddings = word_embeddings
        self.bias = Parameter(word_embeddings.weight.new_zeros(word_embeddings.num_embeddings))

    def forward_flops(self, length: int) -> float:
        """FLOPs per position."""
        return 2.0 * self.word_embeddings.weight.numel()

    def inner(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        """What the word table is multiplied with: the states themselves."""
        return hidden

    def forward(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
        """Logits at the given states. Pass only those that are needed: this is the most expensive product."""
        return F.linear(self.inner(hidden), self.word_embeddings.weight, self.bias)


class MaskedLMHead(TiedLMHead):
    """Logits over the vocabulary: dense, GELU, LayerNorm, product with the word embeddings, bias.

    Args:
        config: settings of the encoder.
        word_embeddings: (V, E); the output matrix is tied to it.
        projection: E to D; the output matrix is then the product of the two, (V, D), and the inner width D.

    Reference: Devlin et al. 2019; released ELECTRA, where the inner width is the embedding size.
    """

    def __init__(self, config: ModelConfig, word_embeddings: nn.Embedding, projection: nn.Linear | None = None) -> None:
        super().__init__(config, word_embeddings)
        width = word_embeddings.embedding_dim if projection is None else projection.out_features
        layers = config.head_layers()
        self.dense = nn.Linear(config.hidden_size, width, bias=layers.bias)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_epsilon, bias=layers.norm_bias)
        self.input_size = config.hidden_size
        self.projection = projection

    def forward_flops(self, length: int) -> float:
        """FLOPs per position."""
        return parts_flops(length, self.dense, self.projection) + super().forward_flops(length)

    def inner(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... E"]:
        """What the word table is multiplied with."""
        inner = normalized(self.norm, linear_gelu(self.dense, hidden)).operand
        return inner if self.projection is None else F.linear(inner, self.projection.weight.t())


class CopyMLMHead(SumOfParts):
    """Words at every position, and a gate: whether to copy the token that is there.

    Args:
        config: settings of the encoder.
        words: logits over the vocabulary.

    Reference: Clark et al. 2020, section 3.3 (all-tokens MLM): one sigmoid layer.
    """

    predicts: ClassVar[Predicts] = "words or copies"

    def __init__(self, config: ModelConfig, words: TiedLMHead) -> None:
        super().__init__()
        self.words = words
        self.copy_gate = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
        """Logits of the words to write where the token is not copied."""
        return self.words(hidden)  # type: ignore[no-any-return]

    def copy_logits(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "..."]:
        """Logit of each token; positive means that copying is more likely."""
        return self.copy_gate(hidden).squeeze(-1)  # type: ignore[no-any-return]


class PredictionLayers(SumOfParts):
    """The layers of ModernBERT's task heads before the last one: dense, GELU, LayerNorm.

    Args:
        config: settings of the encoder, which decide the biases.

    Reference: Warner et al. 2024 (ModernBERT), released code, `ModernBertPredictionHead`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, layers = config.hidden_size, config.head_layers()
        self.dense = nn.Linear(size, size, bias=layers.bias)
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_epsilon, bias=layers.norm_bias)

    def forward(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        """The states that the last layer of the head reads."""
        return normalized(self.norm, linear_gelu(self.dense, hidden)).operand


class TokenHead(SumOfParts):
    """One number per token: dense, GELU, dense; with a LayerNorm where the architecture has one, see `HeadLayers`.

    Reference: He et al. 2021, the released DeBERTaV3 (`LMMaskPredictionHead`), for a LayerNorm of the context.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, layers = config.hidden_size, config.head_layers()
        self.dense = nn.Linear(size, size, bias=layers.bias)
        has_norm, self.reads_first = layers.token_norm != "none", layers.token_norm == "context"
        self.norm = nn.LayerNorm(size, eps=config.layer_norm_epsilon, bias=layers.norm_bias) if has_norm else None
        self.output = nn.Linear(size, 1)

    def forward(self, hidden: Float[Tensor, "B L D"], position_ids: Int[Tensor, "B L"] | None = None) -> Float[Tensor, "B L"]:
        """The number of each token.

        Args:
            position_ids: position of each token within its text; None: a row is one text.
        """
        if self.reads_first and self.norm is not None:
            first = hidden[:, :1]
            if position_ids is not None:
                starts = (torch.arange(hidden.shape[1], device=hidden.device) - position_ids).clamp(min=0)
                first = hidden.gather(1, starts[..., None].expand_as(hidden))
            hidden = normalized(self.norm, first + hidden).operand
        inner = linear_gelu(self.dense, hidden)
        if self.norm is not None and not self.reads_first:
            inner = normalized(self.norm, inner).operand
        return self.output(inner).squeeze(-1)  # type: ignore[no-any-return]


class ReplacedTokenHead(TokenHead):
    """One logit per token: positive means *replaced*, as in the released code and Hugging Face.

    Reference: Clark et al. 2020, section 2; the released code's dense layer and GELU in between.
    """

    predicts: ClassVar[Predicts] = "replaced"


class EnergyHead(TokenHead):
    """Energy of each token in its context, in nats: high means unlikely; exp(-energy) is its unnormalized probability.

    Differs: the paper's energy is one product w . h; the released code has the discriminator's dense layer and GELU before it.
    Reference: Clark et al. 2020 (Electric), section 2.1.
    """

    predicts: ClassVar[Predicts] = "energy"


class BilinearTerm(SumOfParts):
    """Compatibility of each token with its context, as a product of the two: logit_t = (U h_t) . e(x_t).

    Added to the logits of the ordinary head. Whether a token fits depends on token *and* context; a hidden state is a sum of
    both, from which a head would first have to reconstruct the product.

    Args:
        config: settings of the encoder.
        embedding_size: E, width of the word vectors.
    """

    def __init__(self, config: ModelConfig, embedding_size: int) -> None:
        super().__init__()
        self.context = nn.Linear(config.hidden_size, embedding_size, bias=False)

    def forward(self, hidden: Float[Tensor, "B L D"], words: Float[Tensor, "B L E"]) -> Float[Tensor, "B L"]:
        """The term of each token."""
        return (self.context(hidden) * words).sum(-1)  # type: ignore[no-any-return]


# The logits of an alignment are cosines times e to the power of this, about 10 at first. The factor is trained.
_SHARPNESS = 2.3
_NOWHERE = -1e4
_BUCKETS = 1 << 16
_WEIGHTS = 1 << 21  # buckets times classes


class PairStates(nn.Module):
    """One state per row from the states of two texts: their means, compared, and their tokens, aligned and compared.

    A token is described by its state, to which its word embedding may be appended; the two together are called its state here.
    Each token is aligned to the mean of the other text's states, weighted by the softmax of their cosines times a trained factor.
    Three things are known of it then: its absolute difference from what it is aligned to, its largest cosine, and whether the
    other text has the same token. Each text has the means of these over its tokens, weighted by a trained importance. The state
    of the row is computed from them, the state of [CLS], the mean states of both texts, and the absolute difference and the
    product of these, by a linear layer, GELU and LayerNorm.

    Small encoders need it: from a few thousand pairs they do not learn to compare two texts inside their few layers.

    Args:
        input_size: width W of what is known of each token: its state, followed by its word embedding if the head reads both.
        hidden_size: width D of the state of the row.
        dropout: dropout of the input of the linear layer.

    References: Parikh et al. 2016, "A decomposable attention model for natural language inference" (alignment); Conneau et al.
    2017, "Supervised learning of universal sentence representations" (difference and product); Chen et al. 2017, "Reading
    Wikipedia to answer open-domain questions" (same token); Zhang et al. 2020, "BERTScore" (largest cosines).
    """

    def __init__(self, input_size: int, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(_SHARPNESS))
        self.importance = nn.Parameter(torch.zeros(input_size))  # at first, all tokens are equally important
        self.dropout = Dropout(dropout)
        self.dense = nn.Linear(7 * input_size + 4, hidden_size)
        self.norm = nn.LayerNorm(hidden_size)

    def forward(self, hidden: Float[Tensor, "R L W"], tokens: TokenBatch) -> Float[Tensor, "R D"]:
        """The state of each row. A text alone is compared to zeros, which leaves [CLS] and its means, one of them weighted."""
        real = tokens.attention_mask
        # The states of padding are undefined, and 0 * nan is not 0.
        hidden = hidden.masked_fill(~real[..., None], 0.0)
        is_second = tokens.token_type_ids == 1
        first, second = parts = real & ~is_second, real & is_second
        across = real[:, :, None] & real[:, None, :] & (is_second[:, :, None] != is_second[:, None, :])

        # In float32: a softmax of cosines in bfloat16 loses the differences it is about.
        directions = F.normalize(hidden.float(), dim=-1)
        cosines = (directions @ directions.transpose(1, 2)).masked_fill(~across, _NOWHERE)
        weights = (cosines * self.sharpness.exp()).softmax(-1).masked_fill(~across, 0.0)
        gaps = (hidden - weights.to(hidden.dtype) @ hidden).abs()
        nearest = cosines.amax(-1, keepdim=True).clamp(min=-1.0)
        shared = ((tokens.input_ids[:, :, None] == tokens.input_ids[:, None, :]) & across).any(-1)
        known = torch.cat([gaps, nearest.to(hidden.dtype), shared[..., None].to(hidden.dtype)], -1)

        importance = (hidden @ self.importance).float()
        one, two = mean_state(hidden, first), mean_state(hidden, second)
        aligned = (_weighted(known, importance, part) for part in parts)
        everything = torch.cat([hidden[:, 0], one, two, (one - two).abs(), one * two, *aligned], -1)
        return self.norm(F.gelu(self.dense(self.dropout(everything))))  # type: ignore[no-any-return]


def _weighted(
    known: Float[Tensor, "R L K"], importance: Float[Tensor, "R L"], chosen: Bool[Tensor, "R L"]
) -> Float[Tensor, "R K"]:
    """The mean over the chosen tokens of each row, weighted by the softmax of their importance; zeros without any."""
    weights = importance.masked_fill(~chosen, _NOWHERE).softmax(-1).masked_fill(~chosen, 0.0)
    return (weights.to(known.dtype)[:, None] @ known).squeeze(1)


def mean_state(hidden: Float[Tensor, "R L D"], chosen: Bool[Tensor, "R L"]) -> Float[Tensor, "R D"]:
    """The mean state of the chosen tokens of each row; zeros for a row without any."""
    # Masked by value: the states of padding are undefined, and 0 * inf is not 0. The sum in float32: bf16 has 8 bits.
    total = hidden.masked_fill(~chosen[..., None], 0.0).sum(1, dtype=torch.float32)
    return (total / chosen.sum(1, keepdim=True).clamp(min=1)).to(hidden.dtype)


class NGrams(nn.Module):
    """Logits of a linear model of TF-IDF features: tokens and pairs of adjacent tokens, hashed into buckets.

    For two texts, n-grams that both contain have weights of their own. Further features are the fractions of the tokens, and of
    the pairs of tokens, of each text that the other one contains; each fraction is computed twice, with equal weights and with
    inverse document frequencies as weights. Special tokens count, too.
    Until it is fitted, its logits are 0. All operations can be exported.
    Differs from usual TF-IDF: the norm of a text counts each occurrence of a repeated n-gram on its own.

    Attributes:
        weight: (B, C) weights of the buckets.
        frequencies: (B,) inverse document frequencies.
        overlap: (O, C) weights of the fractions; O is 8 for two texts, 0 for one.
        bias: (C,).

    Reference: Weinberger et al. 2009, "Feature hashing for large scale multitask learning".
    """

    weight: Tensor
    frequencies: Tensor
    overlap: Tensor
    bias: Tensor

    def __init__(self, classes: int, *, pairs: bool = False) -> None:
        super().__init__()
        self.buckets = min(_BUCKETS, _WEIGHTS // classes)
        self.register_buffer("weight", torch.zeros(self.buckets, classes))
        self.register_buffer("frequencies", torch.ones(self.buckets))
        self.register_buffer("overlap", torch.zeros(8 if pairs else 0, classes))
        self.register_buffer("bias", torch.zeros(classes))

    def hashes(self, input_ids: Int[Tensor, "R L"], real: Bool[Tensor, "R L"]) -> tuple[Int[Tensor, "R N"], Bool[Tensor, "R N"]]:
        """The bucket of each n-gram, and whether all its tokens are real."""
        pairs = ((input_ids[:, :-1] + 1) * 1_000_003 + input_ids[:, 1:]) % (1 << 31)
        grams = torch.cat([input_ids, pairs], 1) * 2_654_435_761 % (1 << 32) % self.buckets
        return grams, torch.cat([real, real[:, 1:]], 1)

    def features(
        self, input_ids: Int[Tensor, "R L"], real: Bool[Tensor, "R L"], segments: Int[Tensor, "R L"]
    ) -> tuple[Int[Tensor, "R N"], Float[Tensor, "R N"], Float[Tensor, "R O"]]:
        """The bucket of each n-gram, its value, and the fractions that two texts share; N is 2 L - 1."""
        grams, known = self.hashes(input_ids, real)
        values = self.frequencies[grams] * known
        overlap = values.new_zeros(len(grams), len(self.overlap))
        if len(self.overlap):
            text = torch.cat([segments, segments[:, 1:]], 1).clamp(max=1)
            across = known[:, None] & (text[:, :, None] != text[:, None])
            shared = ((grams[:, :, None] == grams[:, None]) & across).any(-1)
            kinds = 2 * (torch.arange(grams.shape[1], device=grams.device) >= input_ids.shape[1]) + text
            # Sums instead of a matrix product, which autocast would compute in bfloat16.
            of_kind = kinds[:, None, None] == torch.arange(4, device=grams.device)[:, None]
            weights = torch.stack([known.float(), values], 1)[:, :, None] * of_kind
            overlap = ((weights * shared[:, None, None]).sum(-1) / weights.sum(-1).clamp(min=1e-6)).flatten(1)
            grams = (grams + shared * (self.buckets // 2)) % self.buckets
        return grams, values / values.square().sum(1, keepdim=True).sqrt(), overlap

    def forward(
        self, input_ids: Int[Tensor, "R L"], real: Bool[Tensor, "R L"], segments: Int[Tensor, "R L"]
    ) -> Float[Tensor, "R C"]:
        grams, values, overlap = self.features(input_ids, real, segments)
        overlap_logits = (overlap[..., None] * self.overlap).sum(1)
        return (self.weight[grams] * values[..., None]).sum(1) + overlap_logits + self.bias
