"""Exponential moving average of the weights, which is evaluated and used in place of the weights of the last step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from discern.training.checkpoint import model_tensors
from discern.training.config import TrainConfig


@torch.no_grad()
def update_average(average: dict[str, Tensor], own: Mapping[str, Tensor], decay: float, updates: int) -> None:
    """Add the present weights to an average, in place.

    After n updates, the weights k updates ago have weight (1 - decay) decay^k / (1 - decay^n). The weights before the first
    update have none, so that the average is not biased towards them, however short the run.

    Args:
        average: every parameter and buffer by name, in float32; empty before the first update.
        own: the present ones, in float32.
        updates: n, this update included.
    """
    if updates == 1:
        average.clear()
        average.update({name: tensor.clone() for name, tensor in own.items()})
        return
    moving = [name for name in average if average[name].is_floating_point()]
    share = (1 - decay) / (1 - decay**updates)
    torch._foreach_lerp_([average[name] for name in moving], [own[name] for name in moving], share)
    for name in average.keys() - set(moving):
        average[name].copy_(own[name])


@contextmanager
def averaged(model: nn.Module, average: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which the model has the averaged weights, if there are any; then its own again, to the last bit."""
    own = {name: tensor.clone() for name, tensor in model_tensors(model).items()} if average else {}
    use_average(model, average)
    try:
        yield
    finally:
        use_average(model, own)


@torch.no_grad()
def use_average(model: nn.Module, average: Mapping[str, Tensor]) -> None:
    """Copy averaged weights into the model; nothing if there are none."""
    own = model_tensors(model)
    for name, tensor in average.items():
        own[name].copy_(tensor)


def average_warning(train: TrainConfig, steps: int) -> str | None:
    """A warning about an average that spans more updates than the run has; None if it does not."""
    span = round(1 / (1 - train.weight_average))
    if not train.weight_average or steps >= span:
        return None
    return (
        f"train.weight_average {train.weight_average:g} averages over about {span:,} updates, but the run has {steps:,}: the "
        "average still contains its early weights. Set train.weight_average to a smaller value, or to 0 to use the last weights"
    )
