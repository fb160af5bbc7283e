"""Weights in bfloat16 during training: rounded stochastically without bias, or beside float32 copies that are updated.

Only matrices are stored so, the weights of linear layers and the tables of embeddings, which are nearly all of a network. Biases,
norms and all moments stay float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import BFloat16, Float32
from torch import Tensor, nn

from discern.errors import ConfigError
from discern.training.checkpoint import model_tensors
from discern.training.config import TrainConfig
from discern.training.parallel import Ranks

_DROPPED_BITS = 16  # of float32's 32, of which bfloat16 keeps the upper half


def check_weight_precision(train: TrainConfig, ranks: Ranks) -> None:
    """Refuse weights in bfloat16 where they are not supported.

    Raises:
        ConfigError: weights that are to be rounded at random would be divided among several processes.
    """
    if train.weight_precision == "bfloat16" and train.divides_weights(ranks.world_size):
        raise ConfigError(
            f"train.weight_precision is bfloat16, which does not work with train.parallel='{train.parallel}': FSDP rounds "
            "gradients to the precision of the weights that it divides",
            hint="--set train.weight_precision=bfloat16-masters, whose float32 copies are divided, or --set train.parallel=ddp",
        )


def lower_weights(model: nn.Module, weight_precision: str) -> dict[nn.Parameter, Tensor]:
    """Store the matrices of a model in bfloat16, in place. Return the float32 copies that are to be updated instead, if any.

    Gradients stay float32, so that those of many micro-batches can be summed.

    Args:
        weight_precision: as in `train.weight_precision`; 'float32' changes nothing.
    """
    masters: dict[nn.Parameter, Tensor] = {}
    if weight_precision == "float32":
        return masters
    for parameter in matrices(model):
        if weight_precision == "bfloat16-masters":
            masters[parameter] = parameter.detach().float()
        parameter.data = parameter.detach().bfloat16()
        parameter.grad_dtype = torch.float32
    return masters


def raise_weights(model: nn.Module, masters: Mapping[nn.Parameter, Tensor]) -> None:
    """Undo `lower_weights`: the float32 copies become the weights again, or else the bfloat16 weights become float32."""
    for parameter in matrices(model):
        if parameter.dtype == torch.bfloat16:
            parameter.grad = None
            parameter.data = masters[parameter] if parameter in masters else parameter.detach().float()


@contextmanager
def lowered(model: nn.Module, weight_precision: str) -> Iterator[dict[nn.Parameter, Tensor]]:
    """A context in which the matrices of a model are stored as they are while it trains, but are not updated.

    Yields the float32 copies, as `lower_weights` returns them.
    """
    masters = lower_weights(model, weight_precision)
    try:
        yield masters
    finally:
        raise_weights(model, masters)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights of linear layers and the tables of embeddings, each once."""
    found = {id(part.weight): part.weight for part in model.modules() if isinstance(part, nn.Linear | nn.Embedding)}
    return [weight for weight in model.parameters() if id(weight) in found]


def full_weights(model: nn.Module, masters: Mapping[nn.Parameter, Tensor]) -> dict[str, Tensor]:
    """Every parameter and buffer once by name, those in bfloat16 as their float32 copies, or as float32."""
    copies = {name: masters[parameter] for name, parameter in model.named_parameters() if parameter in masters}
    return {
        name: copies.get(name, tensor.float() if tensor.dtype == torch.bfloat16 else tensor)
        for name, tensor in model_tensors(model).items()
    }


def rounded_at_random(values: Float32[Tensor, "..."], generator: torch.Generator | None = None) -> BFloat16[Tensor, "..."]:
    """Stochastic rounding to bfloat16: up or down, with the probability that makes the expected value the number itself.

    Rounding to the nearest would lose all updates smaller than half of the spacing of bfloat16, 1/256 of a weight at most, as
    most updates are. Numbers that bfloat16 has stay as they are.

    Reference: Gupta et al. 2015, "Deep learning with limited numerical precision"; Zamirai et al. 2020, "Revisiting BFloat16
    training".
    """
    # The bits of a float32 count up with its size: random ones are added to those that bfloat16 lacks, which are then cut off.
    bits = torch.randint(1 << _DROPPED_BITS, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits.add_(values.contiguous().view(torch.int32)).bitwise_and_(-1 << _DROPPED_BITS)
    return bits.view(torch.float32).bfloat16()


def generator_on(device: torch.device, key: int) -> torch.Generator | None:
    """A generator with a seed; None on the meta device, which draws nothing."""
    return None if device.type == "meta" else torch.Generator(device).manual_seed(key)


def in_parts(
    parameters: Sequence[nn.Parameter], masters: Mapping[nn.Parameter, Tensor], most: int
) -> Iterator[list[nn.Parameter]]:
    """The parameters in order, in parts whose temporary float32 copies have at most `most` numbers, or one tensor alone."""
    part: list[nn.Parameter] = []
    held = 0
    for parameter in parameters:
        size = parameter.numel() if parameter.dtype == torch.bfloat16 and parameter not in masters else 0
        if part and held + size > most:
            yield part
            part, held = [], 0
        part.append(parameter)
        held += size
    if part:
        yield part
