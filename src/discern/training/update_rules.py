"""How an optimizer updates the weights of a group: AdamW, StableAdamW and Muon."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor

from discern import kernels
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
        parameters, gradients, (means, squares) = update.parameters, update.gradients, update.moments
        if update.allowed is None and kernels.dense([*parameters, *gradients, *means, *squares]):
            first, second = self.corrections(update.number)
            kernels.adamw(
                parameters,
                gradients,
                means,
                squares,
                rate=update.rate / first,
                kept=1 - update.rate * update.decay,
                betas=(self.beta1, self.beta2),
                root=second**0.5,
                epsilon=self.epsilon,
            )
            return
        step = torch.full((), float(update.number) if self.bias_correction else math.inf, device=parameters[0].device)
        torch._fused_adamw_(
            parameters,
            gradients,
            means,
            squares,
            [],
            [step] * len(parameters),
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
        dtype = torch.bfloat16 if self.precision == "bfloat16" else torch.float32
        by_shape: dict[torch.Size, list[int]] = {}
        for number, direction in enumerate(directions):
            by_shape.setdefault(direction.shape, []).append(number)
        for (rows, columns), numbers in by_shape.items():
            # Matrices of one shape in one product: a network has dozens, and each alone is too small to keep a GPU busy.
            stacked = torch.cat([directions[number] for number in numbers]).view(-1, rows // self.parts, columns)
            changes = orthogonalized(stacked, dtype).to(stacked.dtype).reshape(len(numbers), rows, columns)
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
    if tall:  # the products below are of the size of the shorter side
        current = current.mT
    current = current / torch.linalg.matrix_norm(current, keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = current @ current.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic)
        current = torch.baddbmm(current, polynomial, current, beta=linear)
    return current.mT if tall else current


def adam_rule(config: OptimizerConfig) -> AdamRule:
    """The rule for all weights, or with 'muon' for those that are not hidden matrices."""
    kind = StableAdamW if config.name == "stable-adamw" else AdamW
    return kind(config.beta1, config.beta2, config.epsilon, config.bias_correction)
