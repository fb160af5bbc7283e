"""The optimizer, its parameter groups, and gradient clipping."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from discern import kernels
from discern.corruption.randomness import key_of
from discern.errors import CheckpointError, ConfigError
from discern.models.base import Encoder
from discern.models.heads import MaskedLMHead
from discern.training.config import OptimizerConfig
from discern.training.precision import rounded_at_random
from discern.training.update_rules import Muon, Update, UpdateRule, adam_rule, full_tensor, local, local_part

_COPIES = 8


class Optimizer(torch.optim.Optimizer):
    """Updates groups of weights, each by its own rule.

    Args:
        groups: parameter groups with `weight_decay`, `scale`, a factor of the learning rate, and `rule`; AdamW by default.
        masters: float32 copies of weights in bfloat16, which are updated in their place. Other weights in bfloat16 are updated in
            float32 and rounded stochastically.
        seed: of that rounding, together with the number of the update.

    Raises:
        ConfigError: a rule cannot update one of its parameters.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        config: OptimizerConfig,
        masters: Mapping[nn.Parameter, Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": config.learning_rate, "weight_decay": config.weight_decay, "scale": 1.0, "rule": adam_rule(config)}
        super().__init__(list(groups), defaults)
        self.updates = 0
        self.masters, self._seed = dict(masters or {}), seed
        for group in self.param_groups:
            for parameter in group["params"]:
                problem = group["rule"].refuses(parameter)
                if problem is not None:
                    raise ConfigError(
                        f"'{group['rule'].name}' cannot update a weight of shape {tuple(parameter.shape)}: {problem}",
                        hint="update it by AdamW; `hidden_matrices` and `Encoder.stacked_layers` tell which weights are matrices",
                    )

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
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        low = [weight for weight in parameters if weight.dtype == torch.bfloat16 and weight not in self.masters]
        rounding = None
        if low and not low[0].is_meta:
            rounding = torch.Generator(low[0].device).manual_seed(key_of(self._seed, "rounding", self.updates))
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            # Weights in bfloat16 have temporary float32 copies, of a few at a time.
            size = _COPIES if low else len(moved)
            for start in range(0, len(moved), max(size, 1)):
                self._step(group, moved[start : start + size], allowed, rounding)

    def _step(
        self, group: dict[str, Any], moved: list[nn.Parameter], allowed: Bool[Tensor, ""] | None, rounding: torch.Generator | None
    ) -> None:
        """Update some parameters of a group."""
        rule: UpdateRule = group["rule"]
        for parameter in moved:
            self._begin_moments(parameter, rule)
        gradients = [local(parameter.grad).float() for parameter in moved if parameter.grad is not None]
        if allowed is not None and not rule.holds_back:
            for gradient in gradients:  # selected, not multiplied: zero times NaN is NaN
                gradient.masked_fill_(~allowed, 0.0)
        full = [self._weight_of(parameter) for parameter in moved]
        moments = [[self.state[parameter][name] for parameter in moved] for name in rule.moments]
        rate, decay = group["lr"] * group["scale"], group["weight_decay"]
        rule.update(Update(full, gradients, moments, rate, decay, self.updates, allowed, list(moved)))
        for parameter, values in zip(moved, full, strict=True):
            self._store(parameter, values, rounding)

    def _weight_of(self, parameter: nn.Parameter) -> Tensor:
        """The float32 weight that the rule updates in place: the parameter, its float32 copy, or a temporary one."""
        return self.masters[parameter] if parameter in self.masters else local(parameter).float()

    def _store(self, parameter: nn.Parameter, values: Tensor, rounding: torch.Generator | None) -> None:
        """Write an updated weight back to its parameter, unless it is the parameter."""
        if parameter in self.masters:
            parameter.copy_(values)
        elif parameter.dtype == torch.bfloat16:
            parameter.copy_(rounded_at_random(values, rounding))

    def begin_moments(self) -> None:
        """Create the moments of all parameters now, rather than with their first update."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._begin_moments(parameter, group["rule"])

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next update, which each group scales."""
        for group in self.param_groups:
            group["lr"] = rate

    def tensors(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        """The moments by parameter name, such as `<name>.mean` and `<name>.square`, for a checkpoint."""
        return {key: full_tensor(*shard) for key, shard in self.shards(names).items()}

    def shards(self, names: Mapping[nn.Parameter, str]) -> dict[str, tuple[Tensor, Tensor]]:
        """This rank's parts of the moments by parameter name, each with its parameter."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return {f"{names[weight]}.{kind}": (value, weight) for weight in parameters for kind, value in self.state[weight].items()}

    def _begin_moments(self, parameter: Tensor, rule: UpdateRule) -> None:
        if not self.state[parameter]:
            self.state[parameter] = {name: torch.zeros_like(local(parameter), dtype=torch.float32) for name in rule.moments}

    def load_tensors(self, tensors: Mapping[str, Tensor], names: Mapping[nn.Parameter, str], updates: int) -> None:
        """Load the moments that `tensors` returned.

        Raises:
            CheckpointError: they are not those of the same weights and rules.
        """
        self.updates = updates
        shapes = {
            f"{names[parameter]}.{kind}": parameter.shape
            for group in self.param_groups
            for parameter in group["params"]
            for kind in group["rule"].moments
        }
        stored = {key: value.shape for key, value in tensors.items()}
        weights = {key.rpartition(".")[0] for key in tensors}  # others have not been updated yet
        expected = {key: shape for key, shape in shapes.items() if key.rpartition(".")[0] in weights}
        if stored != expected:
            key = sorted(stored.items() ^ expected.items())[0][0]
            raise CheckpointError(
                f"the optimizer of the checkpoint does not fit this run: '{key}' is {tuple(stored.get(key, ())) or 'absent'} "
                f"there and {tuple(expected.get(key, ())) or 'absent'} here"
            )
        parameters = {name: parameter for parameter, name in names.items()}
        for key, value in tensors.items():
            name, kind = key.rsplit(".", 1)
            parameter = parameters[name]
            self.state[parameter][kind] = local_part(value.to(local(parameter).device), parameter)


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
    tops = _tops(name for name, _ in every_name)
    depths: dict[nn.Parameter, int] = {}
    for name, parameter in every_name:
        # Without decay all layers are one group, so that few kernels update them.
        depth = _below(name, tops, config.layer_decay_gap) if config.layer_decay < 1 else 0
        depths[parameter] = max(depths.get(parameter, 0), depth)
    groups: dict[tuple[str, int, bool, int], list[nn.Parameter]] = {}
    for _, parameter in named:
        parts = matrices.get(parameter, 0)
        groups.setdefault((Muon.name if parts else rest.name, parts, parameter.ndim > 1, depths[parameter]), []).append(parameter)
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
    of heads (a vector, or an `output` with one row per class), biases, norms and the vectors of an XLNet's attention are not.

    Reference: Jordan et al. 2024: Muon is for the hidden layers; the first and the last are better updated by AdamW.
    """
    encoders = [part for part in model.modules() if isinstance(part, Encoder)]
    inside = {part for encoder in encoders for part in encoder.modules()}
    stacked = {id(layer.weight): parts for encoder in encoders for layer, parts in encoder.stacked_layers().items()}
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    # A projection of the word table that a head's output matrix is tied to as well.
    tied = (part.projection for part in model.modules() if isinstance(part, MaskedLMHead))
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
        counts["parameters"] += sum(parameter.numel() for parameter in group["params"])
    return found


def counts_text(counts: Mapping[str, Mapping[str, int]]) -> str:
    """`counts_by_rule` in words."""
    ordered = sorted(counts.items(), key=lambda item: item[0] != Muon.name)
    kinds = {rule: "matrices" if rule == Muon.name else "tensors" for rule in counts}
    return "; ".join(
        f"{rule} updates {each['tensors']:,} {kinds[rule]} with {each['parameters']:,} parameters" for rule, each in ordered
    )


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
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    if limit > 0:
        # A norm within the limit must leave the gradients untouched to the last bit, hence the clamp at 1.
        torch._foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
    return norm


def _block(name: str) -> int | None:
    found = re.search(r"\bblocks\.(\d+)\.", name)
    return int(found.group(1)) if found else None


def _tops(names: Iterable[str]) -> dict[str, int]:
    """Depth of the heads of each network: its layers including the embeddings, which have depth 0."""
    tops: dict[str, int] = {}
    for name in names:
        network, block = name.partition(".")[0], _block(name)
        if block is not None:
            tops[network] = max(tops.get(network, 0), block + 2)
    return tops


def _below(name: str, tops: Mapping[str, int], gap: int) -> int:
    """Number of layers between a parameter and the heads of its network."""
    top, block = tops.get(name.partition(".")[0], max(tops.values(), default=1)), _block(name)
    if block is not None:
        return top + gap - (block + 1)
    # The embeddings, their projection and LayerNorm, and the initial query are below all blocks.
    return top + gap if re.search(r"\b((embeddings|projection|embedding_norm)\.|query_embedding$)", name) else 0
