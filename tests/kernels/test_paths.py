"""A step of every objective on the kernels and without them: the same losses and gradients, and padding costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from discern import kernels
from discern.models import fused_ops
from discern.models.electra.encoder import Block
from discern.models.fused_ops import Dropout
from discern.models.unpadding import plan_unpadding
from discern.objectives import objectives
from discern.objectives.base import Objective
from discern.types import TokenBatch
from tests.models.test_encoder import packed_row, step_gradients
from tests.parity.small_networks import build, sizes, token_batch
from tests.paths import on_path

BATCHES = {
    "full": token_batch([17, 17, 17]),
    "padded": token_batch([17, 9, 3], 20),
    "padded segments": token_batch([17, 12, 5], 19, second=[6, 4, 3]),
    "packed": packed_row([11, 3, 14], 0)[0],
    "packed and padded": packed_row([11, 3, 14], 5)[0],
}
VARIANTS = {
    "post-norm": {},
    "pre-norm": {"normalization": "pre"},
    "one width": {"embedding_size": 32, "num_heads": 2},
    "odd heads": {"hidden_size": 36, "num_heads": 3},
}


def small(name: str, variant: str = "post-norm") -> Objective:
    """An objective in training mode, on the encoder that it needs."""
    changes = VARIANTS[variant]
    if name == "permutation-lm":
        width = changes.get("hidden_size", 32)
        changes = {**changes, "encoder": "xlnet", "embedding_size": width}
        changes.pop("normalization", None)  # a setting of the other encoder
    return build(sizes(**changes), name).train()


@pytest.fixture(autouse=True)
def _kernels() -> None:
    next(on_path("kernels"))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", objectives.names())
def test_losses_and_gradients_are_those_of_the_plain_path(name: str, variant: str, batch: str) -> None:
    found = []
    for context in (nullcontext(), kernels.switched_off()):
        with context:
            found.append(step_gradients(small(name, variant), BATCHES[batch]))
    ours, plain = found
    assert ours.keys() == plain.keys()
    largest = max(float(gradient.abs().max()) for gradient in plain.values())
    for parameter, gradient in plain.items():
        torch.testing.assert_close(
            ours[parameter], gradient, atol=1e-5 * largest, rtol=1e-4, msg=lambda m, p=parameter: f"{p}: {m}"
        )


def autocast_gradients(objective: Objective, batch: TokenBatch) -> dict[str, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return step_gradients(objective, batch)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", objectives.names())
def test_bfloat16_is_as_near_to_float32_as_on_the_plain_path(name: str, batch: str) -> None:
    """By the angle between whole gradients: rounding differs place by place, the direction must not."""
    exact = step_gradients(small(name), BATCHES[batch])
    angles = []
    for context in (nullcontext(), kernels.switched_off()):
        with context:
            rounded = autocast_gradients(small(name), BATCHES[batch])
        one, other = (torch.cat([gradient.double().flatten() for gradient in found.values()]) for found in (rounded, exact))
        angles.append(1 - float(torch.cosine_similarity(one, other, dim=0)))
    # A sample that falls to the other side of a boundary changes the step, most where the loss is of the samples alone.
    assert angles[0] < max(2 * angles[1], 5e-3)


def test_the_layout_by_hand() -> None:
    weights = torch.zeros(1)
    ids = torch.zeros(3, 4, dtype=torch.long)
    full = plan_unpadding(ids, None, None, weights)
    assert full.places is None
    assert full.offsets is not None
    assert full.offsets.tolist() == [0, 4, 8, 12]
    mask = torch.tensor([[True, True, False, False], [False] * 4, [True, False, True, True]])
    padded = plan_unpadding(ids, mask, None, weights)
    assert padded.places is not None and padded.offsets is not None  # noqa: PT018
    assert padded.places.tolist() == [0, 1, 8, 10, 11]
    assert padded.offsets.tolist() == [0, 2, 5]
    documents = torch.tensor([[0, 0, 1, 1], [1, 2, 2, 2], [0, 0, 0, 0]])
    pieces = plan_unpadding(ids, None, documents, weights)
    assert pieces.places is None
    assert pieces.offsets is not None
    assert pieces.offsets.tolist() == [0, 2, 4, 5, 8, 12]
    both = plan_unpadding(ids, mask, documents, weights)
    assert both.offsets is not None
    assert both.offsets.tolist() == [0, 2, 5]
    nothing = plan_unpadding(ids, torch.zeros_like(mask), None, weights)
    assert nothing.offsets is not None
    assert nothing.offsets.tolist() == [0, 0]


def test_linear_layers_see_real_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    network = build(sizes()).networks()["discriminator"]
    for part in network.encoder.modules():
        if isinstance(part, Block):
            part.register_forward_hook(lambda _, inputs, output: seen.append(output.values.numel() // output.values.shape[-1]))
    batch = BATCHES["padded"]
    hidden = network.encoder(batch.input_ids, batch.attention_mask, batch.token_type_ids)
    assert set(seen) == {17 + 9 + 3}
    assert not hidden[~batch.attention_mask].any()
    assert hidden[batch.attention_mask].any(-1).all()


def joints(*, biased: bool) -> dict[str, Callable[[Tensor, Tensor], tuple[Tensor, ...]]]:
    """The operations between matrix products: functions of a layer's input and of a residual."""
    torch.manual_seed(0)
    square, gated = nn.Linear(24, 24, bias=biased), nn.Linear(24, 2 * 40, bias=biased)
    norm = nn.LayerNorm(24, bias=biased)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    dropout = Dropout(0.1).eval()
    return {
        "linear_gelu": lambda x, _: (fused_ops.linear_gelu(square, x),),
        "linear_geglu": lambda x, _: (fused_ops.linear_geglu(gated, x),),
        "linear_residual_norm": lambda x, residual: fused_ops.linear_residual_norm(square, x, residual, norm, dropout),
        "linear_add_norm": lambda x, residual: fused_ops.linear_add_norm(square, x, residual, norm, dropout),
        "normalized": lambda x, _: fused_ops.normalized(norm, x),
        "modules of linear_gelu": lambda x, _: (F.gelu(square(x)),),
        "modules of linear_geglu": lambda x, _: ((lambda left, right: F.gelu(left) * right)(*gated(x).chunk(2, -1)),),
        "modules of linear_residual_norm": lambda x, residual: (norm(residual + square(x)),) * 2,
        "modules of linear_add_norm": lambda x, residual: (total := residual + square(x), norm(total)),
        "modules of normalized": lambda x, _: (norm(x),) * 2,
    }


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ["linear_gelu", "linear_geglu", "linear_residual_norm", "linear_add_norm", "normalized"])
def test_joints_on_both_paths_are_those_of_the_modules(name: str, biased: bool, low: bool) -> None:
    operations = joints(biased=biased)
    random = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, 7, 24, generator=random, requires_grad=True) for _ in range(2)]
    weights = torch.randn(2, 7, 40, generator=random)
    found = []
    for operation, context in (
        (operations[f"modules of {name}"], nullcontext()),
        (operations[name], kernels.switched_off()),
        (operations[name], nullcontext()),
    ):
        with context, torch.autocast("cpu", torch.bfloat16, enabled=low):
            results = operation(*inputs)
        loss = sum((result.float() * weights[..., : result.shape[-1]]).sum() for result in results)
        gradients = torch.autograd.grad(loss, inputs, allow_unused=True)  # type: ignore[arg-type]
        found.append([*results, *(gradient for gradient in gradients if gradient is not None)])
    modules, plain, ours = found
    for one, other in zip(plain, modules, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0, check_dtype=False)
    tolerance = 0.05 if low else 1e-5
    for one, other in zip(ours, modules, strict=True):
        torch.testing.assert_close(one.float(), other.float(), atol=tolerance, rtol=tolerance)


def test_the_operand_of_a_joint_is_in_the_precision_of_the_products() -> None:
    linear, norm, dropout = nn.Linear(24, 24, bias=False), nn.LayerNorm(24, bias=False), Dropout(0.0)
    residual = torch.randn(5, 24)
    for low in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            states = fused_ops.linear_add_norm(linear, torch.randn(5, 24), residual, norm, dropout)
        assert states.values.dtype == torch.float32
        assert states.operand.dtype == (torch.bfloat16 if low else torch.float32)
