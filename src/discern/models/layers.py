"""Layers that all encoders share: embeddings, dropout, layers computed together with what follows them; and their FLOPs."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.parameter import Parameter

from discern import kernels
from discern.errors import ConfigError
from discern.models.config import ModelConfig


class Dropout(nn.Module):
    """Zeroes elements with a probability and scales the rest, drawing from torch's global generator of the device.

    The loop reseeds that generator from (seed, step, micro-batch, rank), so a resumed step drops the same elements.

    Differs: on the CPU the mask comes from 16-bit integers, four to a 64-bit draw, because torch's Bernoulli there is
    serial and takes several times as long as the arithmetic around it. The probability is then a multiple of 1/65536: 0.1
    becomes 0.10001.

    Args:
        probability: probability that an element becomes zero in training mode.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    @property
    def active(self) -> float:
        """The probability in the current mode: zero in evaluation mode."""
        return self.probability if self.training else 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply dropout in training mode; return `hidden`, of any shape, unchanged in evaluation mode."""
        if self.active == 0.0:
            return hidden
        if kernels.usable(hidden):
            return kernels.dropout(hidden, self.probability)
        if hidden.device.type != "cpu" or torch.compiler.is_compiling():
            return F.dropout(hidden, self.probability)
        return hidden * keep_mask(hidden.shape, self.probability, hidden.dtype)


def keep_mask(shape: torch.Size, probability: float, dtype: torch.dtype) -> Tensor:
    """A CPU mask of `shape`: 0 with `probability`, 1 / (1 - probability) otherwise, so that its mean is 1."""
    threshold = kernels.threshold(probability)
    count = shape.numel()
    draws = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    kept = draws.view(torch.int16)[:count].view(shape) >= threshold - 32768
    return kept.to(dtype).mul_(65536 / (65536 - threshold))


def same_draws(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Save the state of torch's random generators, of the CPU and of a GPU; return a context that draws from it again.

    Two passes of a network over rows of the same shape then drop the same units. After the context, random numbers continue as
    if it had not been entered.
    """
    gpus = [device] if device.type in ("cuda", "mps") else []
    states = [torch.get_rng_state(), *(torch.get_device_module(gpu).get_rng_state(gpu) for gpu in gpus)]

    @contextmanager
    def again() -> Iterator[None]:
        with torch.random.fork_rng(gpus, device_type=device.type if gpus else "cuda"):
            torch.set_rng_state(states[0])
            for gpu, state in zip(gpus, states[1:], strict=True):
                torch.get_device_module(gpu).set_rng_state(state, gpu)
            yield

    return again


class States(NamedTuple):
    """Hidden states, and the copy that the next matrix product reads.

    Attributes:
        values: input of residuals and norms; float32 wherever norms are computed in float32.
        operand: the same in the precision of the matrix products, rounded once rather than once per product.
    """

    values: Float[Tensor, "*tokens D"]
    operand: Float[Tensor, "*tokens D"]


def as_states(hidden: Float[Tensor, "*tokens D"]) -> States:
    """States from the output of a layer in any precision."""
    return States(hidden.float() if hidden.dtype == torch.bfloat16 else hidden, hidden)


def linear_gelu(linear: nn.Linear, operand: Float[Tensor, "*tokens D"]) -> Float[Tensor, "*tokens F"]:
    """GELU of the layer's output, by the error function, as BERT and ELECTRA have it."""
    if kernels.usable(operand, parameters=_parameters(linear)):
        return kernels.bias_gelu(F.linear(operand, linear.weight), linear.bias)
    return F.gelu(linear(operand))


def linear_geglu(linear: nn.Linear, operand: Float[Tensor, "*tokens D"]) -> Float[Tensor, "*tokens F"]:
    """GELU of the first half of the layer's 2F outputs, by the error function, times the second half.

    Reference: Shazeer 2020, "GLU variants improve transformer"; ModernBERT's feed-forward layers.
    """
    if kernels.usable(operand, parameters=_parameters(linear)):
        return kernels.geglu(F.linear(operand, linear.weight), linear.bias)
    left, right = F.linear(operand, linear.weight, linear.bias).chunk(2, -1)
    return F.gelu(left) * right


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def linear_activation(linear: nn.Linear, operand: Float[Tensor, "*tokens D"], activation: str) -> Float[Tensor, "*tokens F"]:
    """The activation, by its name in the configuration, of the layer's output."""
    if activation == "gelu":
        return linear_gelu(linear, operand)
    return _ACTIVATIONS[activation](linear(operand))


def linear_residual_norm(
    linear: nn.Linear,
    operand: Float[Tensor, "*tokens F"],
    residual: Float[Tensor, "*tokens D"],
    norm: nn.LayerNorm,
    dropout: Dropout,
    *,
    keeps_sum: bool = False,
) -> States:
    """LayerNorm(residual + dropout(linear(operand))): the end of each half of a post-norm block.

    Args:
        keeps_sum: the states are the sum itself, and its LayerNorm their operand: the end of each half of a pre-norm block.
    """
    if kernels.usable(operand, parameters=_parameters(linear, norm)) and residual.dtype == torch.float32:
        part = F.linear(operand, linear.weight)
        low = part.dtype == torch.bfloat16
        return States(*kernels.residual_norm(part, linear.bias, residual, norm, dropout.active, low, keeps_sum=keeps_sum))
    total = residual + dropout(linear(operand))
    return States(total, norm(total)) if keeps_sum else as_states(norm(total))


def normalized(norm: nn.LayerNorm, hidden: Float[Tensor, "*tokens D"]) -> States:
    """LayerNorm of the states: the beginning of each half of a pre-norm block."""
    if kernels.usable(hidden, parameters=_parameters(norm)):
        low = torch.is_autocast_enabled("cpu")
        return States(*kernels.residual_norm(hidden, None, None, norm, 0.0, low))
    return as_states(norm(hidden))


def _parameters(*layers: nn.Linear | nn.LayerNorm) -> list[Tensor]:
    """Weights of the layers, and their biases where they have one."""
    return [weight for layer in layers for weight in (layer.weight, layer.bias) if weight is not None]


_CONTAINERS = (nn.ModuleList, nn.Sequential)
# Lookups and element-wise operations count as 0, because they are not matrix products.
_NO_PRODUCTS = (nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity, nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, Dropout)


def module_flops(module: nn.Module, length: int) -> float:
    """FLOPs of the matrix products of a module's forward pass, per token of rows of `length` tokens.

    A product of m x n numbers counts 2 m n. A class of discern, or of another package, provides its count by a method
    `forward_flops(length)`.

    Raises:
        ConfigError: the type of the module, or of one inside it, is unknown here and has no such method.
    """
    count = getattr(module, "forward_flops", None)
    if count is not None:
        return float(count(length))
    if isinstance(module, nn.Linear):
        return 2.0 * module.in_features * module.out_features
    if isinstance(module, _CONTAINERS):
        return sum(module_flops(part, length) for part in module)
    if isinstance(module, _NO_PRODUCTS):
        return 0.0
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    raise ConfigError(
        f"the FLOPs of {name} are unknown",
        hint=f"give {type(module).__name__} a method forward_flops(length) that returns the FLOPs per token of a row",
    )


def parts_flops(length: int, *parts: nn.Module | None) -> float:
    """`module_flops` of several modules together."""
    return sum(module_flops(part, length) for part in parts if part is not None)


class SumOfParts(nn.Module):
    """A module whose products are those of its parts."""

    def forward_flops(self, length: int) -> float:
        """FLOPs per token of a row of `length` tokens."""
        return parts_flops(length, *self.children())


class TokenEmbeddings(nn.Module, abc.ABC):
    """Input of an encoder: a vector for each token."""

    @property
    @abc.abstractmethod
    def table(self) -> nn.Embedding:
        """(V, E) The word table, its own or another network's."""

    @property
    def embedding_size(self) -> int:
        """E."""
        return self.table.embedding_dim

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.table.num_embeddings

    @property
    def weights(self) -> Tensor:
        """The weights of the word table; an encoder computes on their device and in their precision."""
        return self.table.weight

    def words(self, input_ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L E"]:
        """Word vectors, without positions, segments and LayerNorm."""
        return looked_up(self.table.weight, input_ids)

    def detached_parameters(self) -> Iterable[Parameter]:
        """Parameters of another network that are read without gradient."""
        return ()


class WordEmbeddings(TokenEmbeddings):
    """Word vectors, for encoders that handle positions, segments and dropout elsewhere.

    Args:
        vocab_size: V.
        embedding_size: E.
        config: not read here; all embeddings are built with the same arguments.
    """

    def __init__(self, vocab_size: int, embedding_size: int, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.word = nn.Embedding(vocab_size, embedding_size)

    @property
    def table(self) -> nn.Embedding:
        return self.word


class Embeddings(WordEmbeddings):
    """The sum of word, position and segment vectors, normalized and with dropout. Networks share one by default.

    Reference: Clark et al. 2020, section 3.2 (weight sharing). The released code shares the LayerNorm too.

    Args:
        vocab_size: V.
        embedding_size: E, which may differ from the hidden size of the encoders that read it.
        config: sizes of the tables of positions and segments, dropout and epsilon.
    """

    def __init__(self, vocab_size: int, embedding_size: int, config: ModelConfig) -> None:
        super().__init__(vocab_size, embedding_size)
        self.position = nn.Embedding(config.max_positions, embedding_size)
        self.token_type = nn.Embedding(config.num_token_types, embedding_size)
        self.norm = nn.LayerNorm(embedding_size, eps=config.layer_norm_epsilon)
        self.dropout = Dropout(config.hidden_dropout)

    def forward(
        self,
        input_ids: Int[Tensor, "B L"],
        token_type_ids: Int[Tensor, "B L"] | None,
        position_ids: Int[Tensor, "#B L"] | None,
    ) -> Float[Tensor, "B L E"]:
        """Embeddings of the ids; segments default to 0, positions to 0, 1, 2, ..."""
        places = self.places(input_ids, token_type_ids, position_ids)
        return self.dropout(self.norm(self.words(input_ids) + places[0] + places[1]))  # type: ignore[no-any-return]

    def places(
        self,
        input_ids: Int[Tensor, "B L"],
        token_type_ids: Int[Tensor, "B L"] | None,
        position_ids: Int[Tensor, "#B L"] | None,
    ) -> tuple[Float[Tensor, "#B L E"], Float[Tensor, "B L E"]]:
        """Vectors of positions and of segments, with or without gradient."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None, :]
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        return looked_up(self.position.weight, position_ids), looked_up(self.token_type.weight, token_type_ids)


class Disentangled(TokenEmbeddings):
    """Another network's word vectors, read without gradient, plus a trained difference.

    The discriminator then benefits from the words that the generator learns, and its loss, which weighs fifty times as much,
    does not change them. The difference starts at zero.

    Args:
        shared: the generator's embeddings.
        config: settings of the network that reads them.

    Attributes:
        difference: (V, E), added to the words of `shared`.

    Reference: He et al. 2021 (DeBERTaV3), section 3.2, gradient-disentangled embedding sharing.
    """

    def __init__(self, shared: WordEmbeddings, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.shared: Any = shared
        self.difference = nn.Embedding(shared.vocab_size, shared.embedding_size)

    @property
    def table(self) -> nn.Embedding:
        return self.shared.word  # type: ignore[no-any-return]

    @torch.no_grad()
    def merged(self) -> WordEmbeddings:
        """Ordinary embeddings with the same vectors: the shared tables plus the difference."""
        tables: WordEmbeddings = copy.deepcopy(self.shared)
        tables.word.weight += self.difference.weight
        return tables

    def detached_parameters(self) -> Iterable[Parameter]:
        return self.shared.parameters()  # type: ignore[no-any-return]

    def words(self, input_ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L E"]:
        return looked_up(self.table.weight.detach(), input_ids) + looked_up(self.difference.weight, input_ids)


class DisentangledEmbeddings(Disentangled):
    """`Disentangled` with the positions and segments of the other network, without gradient; the LayerNorm is its own."""

    def __init__(self, shared: Embeddings, config: ModelConfig) -> None:
        super().__init__(shared)
        self.norm = nn.LayerNorm(shared.embedding_size, eps=config.layer_norm_epsilon)
        self.dropout = Dropout(config.hidden_dropout)

    def merged(self) -> WordEmbeddings:
        tables = super().merged()
        tables.norm, tables.dropout = copy.deepcopy(self.norm), copy.deepcopy(self.dropout)
        return tables

    forward = Embeddings.forward

    @torch.no_grad()
    def places(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `Embeddings.places`, without gradient."""
        return self.shared.places(*inputs)  # type: ignore[no-any-return]


def looked_up(table: Float[Tensor, "V E"], ids: Int[Tensor, "..."]) -> Float[Tensor, "... E"]:
    """Rows of a table. Those of a table in bfloat16 are float32, and their gradients are summed in float32."""
    if table.dtype != torch.bfloat16:
        return F.embedding(ids, table)
    return _LowLookup.apply(table, ids)  # type: ignore[no-any-return, no-untyped-call]


class _LowLookup(torch.autograd.Function):
    """Rows of a table in bfloat16, in which thousands of gradients of a frequent word could not be summed."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = len(table)
        return F.embedding(ids, table).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        summed: Tensor = torch.ops.aten.embedding_dense_backward(gradient, ids, ctx.rows, -1, False)
        return summed, None
