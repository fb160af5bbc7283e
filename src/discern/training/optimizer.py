"""AdamW, its parameter groups, and gradient clipping."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from discern import kernels
from discern.errors import CheckpointError
from discern.training.config import OptimizerConfig


class AdamW(torch.optim.Optimizer):
    """Adam with decoupled weight decay, with or without bias correction; epsilon is added outside the square root.

    Differs from torch.optim.AdamW: bias correction is optional, as BERT and ELECTRA were trained without it. Without it the first
    updates are larger: for a constant gradient |update| / learning rate is 3.16, 4.25, 4.95, ... and falls towards 1.

    Args:
        groups: parameter groups with `weight_decay` and `scale`, a factor of the learning rate.

    Reference: Loshchilov and Hutter 2019; google-research/bert, optimization.py.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig) -> None:
        super().__init__(list(groups), {"lr": config.learning_rate, "weight_decay": config.weight_decay, "scale": 1.0})
        self._betas = config.beta1, config.beta2
        self._epsilon = config.epsilon
        self._bias_correction = config.bias_correction
        self.updates = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        self.updates += 1
        beta1, beta2 = self._betas
        first, second = (1 - beta1**self.updates, 1 - beta2**self.updates) if self._bias_correction else (1.0, 1.0)
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not moved:
                continue
            gradients = [parameter.grad for parameter in moved]
            for parameter in moved:
                if not self.state[parameter]:
                    self.state[parameter] = {name: torch.zeros_like(parameter) for name in ("mean", "square")}
            means = [self.state[parameter]["mean"] for parameter in moved]
            squares = [self.state[parameter]["square"] for parameter in moved]
            rate = group["lr"] * group["scale"]
            kept = 1 - rate * group["weight_decay"]
            if kernels.dense([*moved, *gradients, *means, *squares]):
                kernels.adamw(
                    moved,
                    gradients,
                    means,
                    squares,
                    rate=rate / first,
                    kept=kept,
                    betas=self._betas,
                    root=second**0.5,
                    epsilon=self._epsilon,
                )
                continue
            torch._foreach_lerp_(means, gradients, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
            divisors = torch._foreach_sqrt(squares)
            torch._foreach_div_(divisors, second**0.5)
            torch._foreach_add_(divisors, self._epsilon)
            torch._foreach_mul_(moved, kept)
            torch._foreach_addcdiv_(moved, means, divisors, -rate / first)

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next update, which each group scales."""
        for group in self.param_groups:
            group["lr"] = rate

    def tensors(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        """The moments by parameter name, `<name>.mean` and `<name>.square`, for a checkpoint."""
        found: dict[str, Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                found |= {f"{names[parameter]}.{kind}": value for kind, value in self.state[parameter].items()}
        return found

    def load_tensors(self, tensors: Mapping[str, Tensor], names: Mapping[nn.Parameter, str], updates: int) -> None:
        """Load the moments that `tensors` returned.

        Raises:
            CheckpointError: a moment is missing or has another shape.
        """
        self.updates = updates
        known = {name: parameter for parameter, name in names.items()}
        for key, value in tensors.items():
            name, kind = key.rsplit(".", 1)
            parameter = known.get(name)
            if parameter is None or parameter.shape != value.shape:
                raise CheckpointError(f"the optimizer's '{key}' {tuple(value.shape)} fits no parameter of this run")
            state = self.state[parameter] or {}
            state[kind] = value.to(parameter.device)
            self.state[parameter] = state
        for key in tensors:
            name, kind = key.rsplit(".", 1)
            other = f"{name}.{'square' if kind == 'mean' else 'mean'}"
            if other not in tensors:
                raise CheckpointError(f"the optimizer has '{key}' but no '{other}'")


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Put every trainable parameter into exactly one group, according to weight decay and layer.

    Vectors (biases, LayerNorm) are not decayed; matrices and embeddings are. With `layer_decay` the learning rate falls
    by that factor per layer, from the heads down to the embeddings. The embeddings of a network are scaled by its own number of
    layers, shared ones by the larger number.

    Reference: Clark et al. 2020, appendix A. The released code skips a depth above the top layer: `layer_decay_gap`.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    tops = _tops(name for all_names in names.values() for name in all_names)
    groups: dict[tuple[bool, int], list[nn.Parameter]] = {}
    for _, parameter in named:
        below = max(_below(name, tops, config.layer_decay_gap) for name in names[parameter])
        groups.setdefault((parameter.ndim > 1, below), []).append(parameter)
    assert sum(len(group) for group in groups.values()) == len(named)
    return [
        {
            "params": parameters,
            "weight_decay": config.weight_decay if decayed else 0.0,
            "scale": config.layer_decay**below,
        }
        for (decayed, below), parameters in sorted(groups.items())
    ]


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `limit` (0: no limit). Return the norm before."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    if kernels.dense(gradients):
        gradient_norm = kernels.gradient_norm(gradients)
        if 0 < limit < gradient_norm + 1e-6:
            kernels.scale_gradients(gradients, limit / (gradient_norm + 1e-6))
        return torch.tensor(gradient_norm)
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    if limit > 0:
        # A norm within the limit must leave the gradients untouched to the last bit, hence the clamp at 1.
        torch._foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
    return norm


def _block(name: str) -> int | None:
    found = re.search(r"\bblocks\.(\d+)\.", name)
    return int(found.group(1)) if found else None


def _network(name: str) -> str:
    """The network that a parameter belongs to: the first part of its name."""
    return name.partition(".")[0]


def _tops(names: Iterable[str]) -> dict[str, int]:
    """Depth of the heads of each network: its layers including the embeddings, which have depth 0."""
    tops: dict[str, int] = {}
    for name in names:
        block = _block(name)
        if block is not None:
            tops[_network(name)] = max(tops.get(_network(name), 0), block + 2)
    return tops


def _below(name: str, tops: Mapping[str, int], gap: int) -> int:
    """Number of layers between a parameter and the heads of its network."""
    top, block = tops.get(_network(name), max(tops.values(), default=1)), _block(name)
    if block is not None:
        return top + gap - (block + 1)
    # The embeddings, their projection and the initial query are below all blocks.
    return top + gap if re.search(r"\b((embeddings|projection)\.|query_embedding$)", name) else 0
