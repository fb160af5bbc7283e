"""The optimizer: rules of its updates (AdamW, StableAdamW, Muon), and which parameters follow which."""

from __future__ import annotations

import abc
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, cast, final

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn

from discern import kernels
from discern.errors import ConfigError
from discern.models.base import Encoder
from discern.training.config import OptimizerConfig

MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
# Jordan 2024: the slope at zero is as steep as possible, so that five steps suffice for all but the smallest singular values.
_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_SMALLEST_NORM = 1e-7
# The RMS of AdamW's updates is between 0.2 and 0.4 in practice (Liu et al. 2025, section 2.2).
_RMS = 0.2


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor on this rank: all of it if it is not sharded."""
    # Here and below not by operations of DTensor: their caches would keep the process group, with its threads, beyond its end.
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def full_tensor(part: Tensor, like: Tensor) -> Tensor:
    """The full tensor, gathered from the ranks.

    Args:
        part: the shard on this rank.
        like: the parameter that is sharded in the same way; if it is not sharded, the part is the full tensor.
    """
    if not hasattr(like, "device_mesh"):
        return part
    group, rows = _group_and_rows(like)
    padded = part.new_zeros(rows, *like.shape[1:])
    padded[: len(part)] = part
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat(gathered)[: len(like)]


def local_part(tensor: Tensor, like: Tensor) -> Tensor:
    """The shard of a full tensor that this rank keeps of a parameter `like` it."""
    if not hasattr(like, "device_mesh"):
        return tensor
    group, rows = _group_and_rows(like)
    return tensor[dist.get_rank(group) * rows :][:rows].clone()


def full_norms(parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each full tensor, of which this rank has a part."""
    # Rows may be absent on a rank, and _foreach_norm needs elements.
    norms = list(torch._foreach_norm([part if part.numel() else part.new_zeros(1) for part in parts]))
    sharded = [number for number, weight in enumerate(like) if hasattr(weight, "device_mesh")]
    if sharded:
        squares = torch.stack([norms[number] for number in sharded]).square()
        dist.all_reduce(squares, group=_group_and_rows(like[sharded[0]])[0])
        for number, norm in zip(sharded, squares.sqrt().unbind(), strict=True):
            norms[number] = norm
    return norms


def _group_and_rows(parameter: Any) -> tuple[dist.ProcessGroup, int]:
    """The ranks that a parameter is sharded among, and its rows on each of them; the last ranks may have fewer."""
    group = parameter.device_mesh.get_group()
    return group, -(-len(parameter) // dist.get_world_size(group))


@dataclass(frozen=True)
class Update:
    """An update of some weights, which a rule computes in place.

    Attributes:
        moments: one list of tensors for each name in the rule's `moments`.
        rate: learning rate.
        decay: weight decay, multiplied by the rate.
        number: number of this update, counted from 1.
        allowed: whether to update at all, decided by the device; None: yes. If not, the gradients are zero, unless the rule
            `holds_back` by itself.
        weights: the parameters themselves, which may be sharded among ranks: all other tensors are this rank's parts.
    """

    parameters: list[Tensor]
    gradients: list[Tensor]
    moments: list[list[Tensor]]
    rate: float
    decay: float
    number: int
    allowed: Bool[Tensor, ""] | None
    weights: list[Tensor]

    def lerp(self, averages: list[Tensor], share: float) -> None:
        """Move averages by a share of their distance to the gradients."""
        if self.allowed is None:
            torch._foreach_lerp_(averages, self.gradients, share)
            return
        torch._foreach_mul_(averages, self.or_one(1 - share))
        torch._foreach_add_(averages, self.gradients, alpha=share)

    def or_one(self, factor: float) -> Any:
        """The factor; 1 if the update is not allowed."""
        return factor if self.allowed is None else torch.where(self.allowed, factor, 1.0)


@dataclass(frozen=True)
class UpdateRule(abc.ABC):
    """How weights are updated, given their gradients.

    Attributes:
        name: as in `optimizer.name`.
        moments: names of the tensors that are kept for each weight, of its shape and zero at first.
        holds_back: whether an update that is not allowed leaves the weights as they are even if their gradients are not finite.
    """

    name: ClassVar[str]
    moments: ClassVar[tuple[str, ...]]
    holds_back: ClassVar[bool] = False

    @abc.abstractmethod
    def update(self, update: Update) -> None:
        """Update weights and moments in place."""


@dataclass(frozen=True)
class AdamRule(UpdateRule):
    """A rule with Adam's two moments, of the gradients and of their squares, with or without bias correction.

    Attributes:
        beta1, beta2: decay of the first and of the second moment.
    """

    moments = ("mean", "square")

    beta1: float
    beta2: float
    epsilon: float
    bias_correction: bool

    def corrections(self, updates: int) -> tuple[float, float]:
        """Divisors of the two moments, which begin at zero."""
        return (1 - self.beta1**updates, 1 - self.beta2**updates) if self.bias_correction else (1.0, 1.0)


@final
@dataclass(frozen=True)
class AdamW(AdamRule):
    """Adam with decoupled weight decay, with or without bias correction; epsilon is added outside the square root.

    Differs from torch.optim.AdamW: bias correction is optional, as BERT and ELECTRA were trained without it. Without it the first
    updates are larger: for a constant gradient |update| / learning rate is 3.16, 4.25, 4.95, ... and falls towards 1.

    Where discern's kernel does not run, torch's fused one does. It computes the same: the decay is decoupled and multiplied by
    the rate, and epsilon is added to the corrected root. Its corrections are 1 - beta^step, so an infinite step turns them off;
    `found_inf` holds an update back.

    Reference: Loshchilov and Hutter 2019; google-research/bert, optimization.py.
    """

    name = "adamw"
    holds_back = True

    def update(self, update: Update) -> None:
        means, squares = update.moments
        lists = update.parameters, update.gradients, means, squares
        if update.allowed is None and kernels.dense(list(chain(*lists))):
            first, second = self.corrections(update.number)
            kernels.adamw(
                *lists,
                rate=update.rate / first,
                kept=1 - update.rate * update.decay,
                betas=(self.beta1, self.beta2),
                root=second**0.5,
                epsilon=self.epsilon,
            )
            return
        step = torch.full((), float(update.number) if self.bias_correction else math.inf, device=means[0].device)
        torch._fused_adamw_(
            *lists,
            [],
            [step] * len(means),
            lr=update.rate,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=update.decay,
            eps=self.epsilon,
            amsgrad=False,
            maximize=False,
            found_inf=None if update.allowed is None else (~update.allowed).float(),
        )


@final
@dataclass(frozen=True)
class StableAdamW(AdamRule):
    """AdamW whose rate for each tensor is divided by the RMS of gradient / sqrt(second moment) wherever that exceeds 1.

    The RMS is large when a gradient is much larger than those before it, which the second moment does not reflect yet. Weight
    decay is multiplied by the reduced rate, too.

    Reference: Wortsman et al. 2023, "Stable and low-precision training for large-scale vision-language models", section 3.4;
    the optimi library, with which ModernBERT was trained.
    """

    name = "stable-adamw"

    def update(self, update: Update) -> None:
        gradients, (means, squares) = update.gradients, update.moments
        first, second = self.corrections(update.number)
        update.lerp(means, 1 - self.beta1)
        torch._foreach_mul_(squares, update.or_one(self.beta2))
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - self.beta2)
        divisors = torch._foreach_sqrt(squares)
        torch._foreach_div_(divisors, second**0.5)
        relative = torch._foreach_div(gradients, torch._foreach_maximum(divisors, self.epsilon))
        # The rates stay tensors: reading them would make the host wait for a GPU.
        weights = update.weights
        roots = torch.tensor([math.sqrt(weight.numel()) for weight in weights])
        norms = torch.stack(full_norms(relative, weights))
        rates = update.rate / (norms / roots.to(norms.device, non_blocking=True)).clamp(min=1)
        if update.allowed is not None:
            rates = rates * update.allowed
        torch._foreach_add_(divisors, self.epsilon)
        changes = torch._foreach_div(means, divisors)
        torch._foreach_mul_(changes, (rates / first).unbind())
        torch._foreach_mul_(update.parameters, (1 - rates * update.decay).unbind())
        torch._foreach_sub_(update.parameters, changes)


@final
@dataclass(frozen=True)
class Muon(UpdateRule):
    """Momentum whose matrix is replaced by the nearest orthogonal one, so that all directions of a matrix are learned equally.

    An update is scaled by 0.2 sqrt(max(rows, columns)), which gives it about the RMS of AdamW's updates: the same learning rate
    and weight decay then suit both. The orthogonal matrix is computed approximately, by five Newton-Schulz iterations.

    Args:
        parts: number of matrices of equal height that each weight holds, one below the other, such as query, key and value.
            Each is orthogonalized separately.
        precision: of the Newton-Schulz iterations: 'float32' or 'bfloat16'.

    Reference: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; Liu et al. 2025, "Muon is scalable for LLM
    training", for scale and weight decay. `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` computes the same, in bfloat16.
    """

    name = "muon"
    moments = ("momentum",)

    parts: int = 1
    precision: str = "float32"

    def update(self, update: Update) -> None:
        (momenta,) = update.moments
        update.lerp(momenta, 1 - MOMENTUM)
        parts = torch._foreach_lerp(update.gradients, momenta, MOMENTUM)  # Nesterov's
        weights = update.weights
        # Every rank computes the change of the full matrix, and keeps its part.
        directions = list(map(full_tensor, parts, weights))
        torch._foreach_mul_(update.parameters, update.or_one(1 - update.rate * update.decay))
        dtype = getattr(torch, self.precision)
        by_shape: dict[torch.Size, list[int]] = {}
        for number, direction in enumerate(directions):
            by_shape.setdefault(direction.shape, []).append(number)
        for (rows, columns), numbers in by_shape.items():
            # Matrices of one shape in one product: a network has dozens, and each alone is too small to keep a GPU busy.
            stacked = torch.cat([directions[number] for number in numbers]).view(-1, rows // self.parts, columns)
            changes = orthogonalized(stacked, dtype).to(stacked).view(-1, rows, columns)
            if update.allowed is not None:
                changes = changes * update.allowed
            scale = _RMS * math.sqrt(max(rows // self.parts, columns))
            shards = [local_part(change, weights[number]) for number, change in zip(numbers, changes.unbind(), strict=True)]
            torch._foreach_add_([update.parameters[number] for number in numbers], shards, alpha=-update.rate * scale)


def orthogonalized(matrices: Float[Tensor, "N R C"], dtype: torch.dtype) -> Float[Tensor, "N R C"]:
    """The matrices with singular values near 1, computed in `dtype`; zero matrices stay zero.

    A singular value above 0.0015 of the Frobenius norm ends between 0.68 and 1.21, a smaller one is multiplied by at most 485.
    All those of random rectangular matrices are above it; of square ones, about 2% are below, and end anywhere from 0 to 0.68.
    """
    linear, cubic, quintic = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    current = matrices.to(dtype)
    current = current / torch.linalg.matrix_norm(current, keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = current.mT @ current if tall else current @ current.mT  # of the size of the shorter side
        polynomial = torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic)
        factors = (current, polynomial) if tall else (polynomial, current)
        current = torch.baddbmm(current, *factors, beta=linear)
    return current


def adam_rule(config: OptimizerConfig) -> AdamRule:
    """The rule for all weights, or with 'muon' for those that are not hidden matrices."""
    kind = StableAdamW if config.name == "stable-adamw" else AdamW
    return kind(config.beta1, config.beta2, config.epsilon, config.bias_correction)


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
