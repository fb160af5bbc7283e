"""What stands on an encoder: the word at a position, and whether the token there was replaced."""

from __future__ import annotations

import abc

from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import Parameter

from discern.model.config import ModelConfig
from discern.model.joints import linear_gelu, normalised


def gather_positions(hidden: Float[Tensor, "B L D"], positions: Bool[Tensor, "B L"]) -> Float[Tensor, "M D"]:
    """Hidden states at the chosen positions, row by row; M = positions.sum()."""
    # By index rather than by mask: its backward pass is a copy of rows.
    return hidden.flatten(0, 1).index_select(0, positions.flatten().nonzero().flatten())


class MaskedLMHead(nn.Module):
    """Logits over the vocabulary: dense, GELU, LayerNorm, product with the word embeddings, bias.

    Args:
        config: of the encoder below.
        word_embeddings: tied output matrix, (V, E).

    Reference: Devlin et al. 2019; released ELECTRA, where the inner width is the embedding size.
    """

    def __init__(self, config: ModelConfig, word_embeddings: nn.Embedding) -> None:
        super().__init__()
        width = word_embeddings.embedding_dim
        self.dense = nn.Linear(config.hidden_size, width)
        self.norm = nn.LayerNorm(width, eps=config.layer_norm_epsilon)
        self.word_embeddings = word_embeddings
        self.bias = Parameter(word_embeddings.weight.new_zeros(word_embeddings.num_embeddings))

    def forward(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
        """Logits at the given states; pass only those of the masked positions, this is the dearest product."""
        inner = normalised(self.norm, linear_gelu(self.dense, hidden)).operand
        return F.linear(inner, self.word_embeddings.weight, self.bias)


class TiedLMHead(nn.Module):
    """Logits over the vocabulary: product with the word embeddings, bias; no layer in between.

    Args:
        config: of the encoder below.
        word_embeddings: tied output matrix, (V, D), as wide as the hidden states.

    Reference: Yang et al. 2019 (XLNet), released code.
    """

    def __init__(self, config: ModelConfig, word_embeddings: nn.Embedding) -> None:
        super().__init__()
        self.word_embeddings = word_embeddings
        self.bias = Parameter(word_embeddings.weight.new_zeros(word_embeddings.num_embeddings))

    def forward(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
        """Logits at the given states; pass only those that are wanted, this is the dearest product."""
        return F.linear(hidden, self.word_embeddings.weight, self.bias)


LanguageHead = MaskedLMHead | TiedLMHead
"""What predicts words."""


class CopyMLMHead(nn.Module):
    """Words at every position, and beside them whether the token there is to be copied.

    Args:
        config: of the encoder below.
        word_embeddings: tied output matrix, (V, E).

    Reference: Clark et al. 2020, section 3.3 (all-tokens MLM): one sigmoid layer.
    """

    def __init__(self, config: ModelConfig, word_embeddings: nn.Embedding) -> None:
        super().__init__()
        self.words = MaskedLMHead(config, word_embeddings)
        self.copy_gate = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
        """Logits of the words that are written where nothing is copied."""
        logits: Tensor = self.words(hidden)
        return logits

    def copy_logits(self, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "..."]:
        """Logit of each token; positive means that copying is the likelier."""
        logits: Tensor = self.copy_gate(hidden).squeeze(-1)
        return logits


class TokenHead(nn.Module, abc.ABC):
    """One number a token: dense, GELU, dense. What it means, each subclass says."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, 1)

    @abc.abstractmethod
    def forward(self, hidden: Float[Tensor, "B L D"]) -> Float[Tensor, "B L"]:
        """The number of each token."""

    def _numbers(self, hidden: Float[Tensor, "B L D"]) -> Float[Tensor, "B L"]:
        return self.output(linear_gelu(self.dense, hidden)).squeeze(-1)  # type: ignore[no-any-return]


class ReplacedTokenHead(TokenHead):
    """One logit a token: positive means *replaced*, as in the released code and Hugging Face.

    Reference: Clark et al. 2020, section 2; the released code's dense layer and GELU in between.
    """

    def forward(self, hidden: Float[Tensor, "B L D"]) -> Float[Tensor, "B L"]:
        """Logit of each token."""
        return self._numbers(hidden)


class EnergyHead(TokenHead):
    """Energy of each token in its context, in nats: high means unlikely, exp(-energy) is its probability unnormalised.

    Differs: the paper's energy is one product w . h; the released code has the discriminator's dense layer and GELU before it.
    Reference: Clark et al. 2020 (Electric), section 2.1.
    """

    def forward(self, hidden: Float[Tensor, "B L D"]) -> Float[Tensor, "B L"]:
        """Energy of each token."""
        return self._numbers(hidden)


class BilinearTerm(nn.Module):
    """How well each token fits its context, as a product of the two: logit_t = (U h_t) . e(x_t).

    Added to the logits of the ordinary head. Whether a token fits is a matter of token *and* context; from the sum that a
    state is, a head must first rebuild that product.

    Args:
        config: of the encoder.
        embedding_size: E, of the words that it compares with.
    """

    def __init__(self, config: ModelConfig, embedding_size: int) -> None:
        super().__init__()
        self.context = nn.Linear(config.hidden_size, embedding_size, bias=False)

    def forward(self, hidden: Float[Tensor, "B L D"], words: Float[Tensor, "B L E"]) -> Float[Tensor, "B L"]:
        """The term of each token."""
        return (self.context(hidden) * words).sum(-1)  # type: ignore[no-any-return]
