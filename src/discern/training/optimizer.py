"""The optimizer, its parameter groups, and gradient clipping."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from discern import kernels
from discern.errors import ConfigError
from discern.models.base import Encoder
from discern.training.config import OptimizerConfig
from discern.training.update_rules import Muon, Update, UpdateRule, adam_rule, full_norms, full_tensor, local, local_part


class Optimizer(torch.optim.Optimizer):
    """Updates groups of weights, each by its own rule.

    Args:
        groups: parameter groups with `weight_decay`, `scale`, a factor of the learning rate, and `rule`; AdamW by default.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], config: OptimizerConfig) -> None:
        defaults = {"lr": config.learning_rate, "weight_decay": config.weight_decay, "scale": 1.0, "rule": adam_rule(config)}
        super().__init__(list(groups), defaults)
        self.updates = 0

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, allowed: Bool[Tensor, ""] | None = None
    ) -> None:
        """Update the parameters that have a gradient.

        Args:
            allowed: whether to update at all, decided by the device and read by it alone; None: yes. Without an update, weights
                and moments stay as they are, to the last bit and whatever the gradients are; `updates` counts it nevertheless.
        """
        self.updates += 1
        for group in self.param_groups:
            rule: UpdateRule = group["rule"]
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            gradients = [local(weight.grad) for weight in weights]
            if allowed is not None and not rule.holds_back:
                for gradient in gradients:  # selected, not multiplied: zero times NaN is NaN
                    gradient.masked_fill_(~allowed, 0.0)
            self._begin_moments(weights, rule)
            moments = [[self.state[weight][name] for weight in weights] for name in rule.moments]
            rate, parts = group["lr"] * group["scale"], list(map(local, weights))
            rule.update(Update(parts, gradients, moments, rate, group["weight_decay"], self.updates, allowed, weights))

    def begin_moments(self) -> None:
        """Create the moments of all parameters now, rather than with their first update."""
        for group in self.param_groups:
            self._begin_moments(group["params"], group["rule"])

    def _begin_moments(self, weights: Iterable[Tensor], rule: UpdateRule) -> None:
        for weight in weights:
            if not self.state[weight]:
                self.state[weight] = {name: torch.zeros_like(local(weight)) for name in rule.moments}

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next update, which each group scales."""
        for group in self.param_groups:
            group["lr"] = rate

    def tensors(self) -> dict[str, Tensor]:
        """The moments by parameter name, such as `<name>.mean` and `<name>.square`, for a checkpoint; all ranks call it."""
        return {key: full_tensor(*shard) for key, shard in self.shards().items()}

    def shards(self) -> dict[str, tuple[Tensor, Tensor]]:
        """This rank's parts of the moments by parameter name, each with its parameter."""
        return {f"{name}.{kind}": (value, weight) for name, weight in self._named() for kind, value in self.state[weight].items()}

    def load_tensors(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Continue from the moments that `tensors` returned, without those of parameters that are not trained now."""
        self.updates = updates
        weights = dict(self._named())
        for key, value in tensors.items():
            name, _, kind = key.rpartition(".")
            if (weight := weights.get(name)) is not None:
                self.state[weight][kind] = local_part(value.to(local(weight).device), weight)

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for group in self.param_groups:
            yield from zip(group["param_names"], group["params"], strict=True)


def parameter_groups(model: nn.Module, config: OptimizerConfig, precision: str = "float32") -> list[dict[str, Any]]:
    """Put every trainable parameter into exactly one group, according to rule, weight decay and layer.

    With optimizer 'muon', hidden matrices are updated by Muon, and all other parameters by AdamW.
    Vectors (biases, LayerNorm) are not decayed; matrices and embeddings are. With `layer_decay` the learning rate falls
    by that factor per layer, from the heads down to the embeddings. The embeddings of a network are scaled by its own number of
    layers, shared ones by the larger number.

    Args:
        precision: of the matrix products of Muon: 'float32' or 'bfloat16'.

    Reference: Clark et al. 2020, appendix A. The released code skips a depth above the top layer: `layer_decay_gap`.

    Raises:
        ConfigError: the model has no matrix that Muon could update.
    """
    matrices = hidden_matrices(model) if config.name == "muon" else {}
    if config.name == "muon" and not matrices:
        raise ConfigError(
            f"optimizer.name is 'muon', but {type(model).__name__} has no hidden matrix (a weight of an nn.Linear)",
            hint="set optimizer.name=adamw",
        )
    rest = adam_rule(config)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    every_name = list(model.named_parameters(remove_duplicate=False))
    # Without decay all layers are one group, so that few kernels update them.
    below = layers_below([name for name, _ in every_name], config.layer_decay_gap) if config.layer_decay < 1 else {}
    depths: dict[nn.Parameter, int] = {}
    for name, parameter in every_name:
        depths[parameter] = max(depths.get(parameter, 0), below.get(name, 0))
    groups: dict[tuple[str, int, bool, int], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        parts = matrices.get(parameter, 0)
        key = Muon.name if parts else rest.name, parts, parameter.ndim > 1, depths[parameter]
        groups.setdefault(key, []).append((name, parameter))
    assert sum(len(group) for group in groups.values()) == len(named)
    return [
        {
            "params": parameters,
            "weight_decay": config.weight_decay if decayed else 0.0,
            "scale": config.layer_decay**below,
            "rule": Muon(parts, precision) if parts else rest,
        }
        for (_, parts, decayed, below), parameters in sorted(groups.items())
    ]


def hidden_matrices(model: nn.Module) -> dict[nn.Parameter, int]:
    """The trainable weights that Muon may update, with the number of matrices that each of them holds.

    They are the weights of linear layers between hidden states. Embeddings, also as the output matrix of a head, the last layers
    of heads (a vector, or an `output` with one row per class), biases, norms and other vectors are not.

    Reference: Jordan et al. 2024: Muon is for the hidden layers; the first and the last are better updated by AdamW.
    """
    encoders = [part for part in model.modules() if isinstance(part, Encoder)]
    inside = {part for encoder in encoders for part in encoder.modules()}
    stacked = {id(layer.weight): parts for encoder in encoders for layer, parts in encoder.stacked_layers().items()}
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    # A projection of the word table that a head's output matrix is tied to as well.
    tied = (getattr(part, "projection", None) for part in model.modules() if hasattr(part, "word_embeddings"))
    tables |= {id(projection.weight) for projection in tied if projection is not None}
    found: dict[nn.Parameter, int] = {}
    for name, part in model.named_modules():
        if not isinstance(part, nn.Linear) or id(part.weight) in tables or not part.weight.requires_grad:
            continue
        last = part not in inside and name.rpartition(".")[2] == "output"
        if not last and min(part.weight.shape) > 1:
            found[cast(nn.Parameter, part.weight)] = stacked.get(id(part.weight), 1)
    return found


def counts_by_rule(model: nn.Module, config: OptimizerConfig) -> dict[str, dict[str, int]]:
    """Number of tensors and of parameters that each rule updates: {"muon": {"tensors": 12, "parameters": 9000}, ...}."""
    found: dict[str, dict[str, int]] = {}
    for group in parameter_groups(model, config):
        counts = found.setdefault(group["rule"].name, {"tensors": 0, "parameters": 0})
        counts["tensors"] += len(group["params"])
        counts["parameters"] += sum(parameter.numel() for _, parameter in group["params"])
    return found


def counts_text(counts: Mapping[str, Mapping[str, int]]) -> str:
    """`counts_by_rule` in words."""
    ordered = sorted(counts.items(), key=lambda item: item[0] != Muon.name)
    kinds = {rule: "matrices" if rule == Muon.name else "tensors" for rule in counts}
    return "; ".join(
        f"{rule} updates {each['tensors']:,} {kinds[rule]} with {each['parameters']:,} parameters" for rule, each in ordered
    )


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scale the gradients so that their norm over all ranks is at most `limit` (0: no limit). Return the norm before."""
    weights = [weight for weight in parameters if weight.grad is not None]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    if not gradients:
        return torch.zeros(())
    if kernels.dense(gradients):
        gradient_norm = kernels.gradient_norm(gradients)
        if 0 < limit < gradient_norm + 1e-6:
            kernels.scale_gradients(gradients, limit / (gradient_norm + 1e-6))
        return torch.tensor(gradient_norm)
    gradients = list(map(local, gradients))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(full_norms(gradients, weights)))
    if limit > 0:
        # A norm within the limit must leave the gradients untouched to the last bit, hence the clamp at 1.
        torch._foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
    return norm


def layers_below(names: Sequence[str], gap: int) -> dict[str, int]:
    """Number of layers between each parameter and the heads of its network; the embeddings count as a layer."""
    blocks = {name: int(block[1]) for name in names if (block := re.search(r"\bblocks\.(\d+)\.", name))}
    tops: dict[str, int] = {}
    for name, number in blocks.items():
        network = name.partition(".")[0]
        tops[network] = max(tops.get(network, 0), number + 2)
    below = {}
    for name in names:
        top = tops.get(name.partition(".")[0], max(tops.values(), default=1)) + gap
        # The embeddings, those of positions and distances, their projection and LayerNorms, and the initial query are below all
        # blocks, and a convolution is beside the first.
        lowest = "embeddings|projection|embedding_norm|position|token_type|distance|distance_norm|convolution"
        is_lowest = re.search(rf"\b(({lowest})\.|query_embedding$)", name)
        below[name] = top - blocks[name] - 1 if name in blocks else top if is_lowest else 0
    return below
