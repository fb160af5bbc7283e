"""A step of every objective on the kernels and without them: the same losses and gradients, and padding costs nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from discern import kernels
from discern.models import layers
from discern.models.attention import TransformerBlock, plan_unpadding
from discern.models.layers import Dropout
from discern.objectives import objectives
from discern.objectives.base import Objective
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


# The batches with the most and the least padding see every variant, the others one.
CASES = [(variant, batch) for variant in VARIANTS for batch in BATCHES if variant == "post-norm" or "padded" in batch]


@pytest.mark.parametrize(("variant", "batch"), CASES)
@pytest.mark.parametrize("name", objectives.names())
def test_losses_and_gradients_are_those_of_the_plain_path(name: str, variant: str, batch: str) -> None:
    ours = step_gradients(small(name, variant), BATCHES[batch])
    with kernels.switched_off():
        plain = step_gradients(small(name, variant), BATCHES[batch])
    assert ours.keys() == plain.keys()
    largest = max(float(gradient.abs().max()) for gradient in plain.values())
    for parameter, gradient in plain.items():
        torch.testing.assert_close({parameter: ours[parameter]}, {parameter: gradient}, atol=1e-5 * largest, rtol=1e-4)


@pytest.mark.parametrize("batch", ["full", "packed and padded"])
@pytest.mark.parametrize("name", objectives.names())
def test_bfloat16_is_as_near_to_float32_as_on_the_plain_path(name: str, batch: str) -> None:
    """By the angle between whole gradients: rounding differs place by place, the direction must not."""

    def direction(*contexts: AbstractContextManager[Any]) -> Tensor:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            return torch.cat([gradient.double().flatten() for gradient in step_gradients(small(name), BATCHES[batch]).values()])

    exact, low = direction(), torch.autocast("cpu", torch.bfloat16)
    angles = [1 - torch.cosine_similarity(direction(low, *off), exact, dim=0) for off in ([], [kernels.switched_off()])]
    # A sample that falls to the other side of a boundary changes the step, most where the loss is of the samples alone.
    assert angles[0] < max(2 * angles[1], 5e-3)


MASK = [[True, True, False, False], [False] * 4, [True, False, True, True]]
DOCUMENTS = [[0, 0, 1, 1], [1, 2, 2, 2], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("mask", "documents", "places", "offsets"),
    [
        (None, None, None, [0, 4, 8, 12]),
        (MASK, None, [0, 1, 8, 10, 11], [0, 2, 5]),
        (None, DOCUMENTS, None, [0, 2, 4, 5, 8, 12]),
        (MASK, DOCUMENTS, [0, 1, 8, 10, 11], [0, 2, 5]),
        ([[False] * 4] * 3, None, [], [0, 0]),
    ],
)
def test_the_layout_by_hand(mask: Any, documents: Any, places: Any, offsets: list[int]) -> None:
    given = (None if values is None else torch.tensor(values) for values in (mask, documents))
    plan = plan_unpadding(torch.zeros(3, 4, dtype=torch.long), *given, torch.zeros(1))
    assert [None if part is None else part.tolist() for part in (plan.places, plan.offsets)] == [places, offsets]


def test_linear_layers_see_real_tokens_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    network = build(sizes()).networks()["discriminator"]
    for part in network.encoder.modules():
        if isinstance(part, TransformerBlock):
            part.register_forward_hook(lambda _, inputs, output: seen.append(output.values.numel() // output.values.shape[-1]))
    batch = BATCHES["padded"]
    hidden = network.encoder(batch.input_ids, batch.attention_mask, batch.token_type_ids)
    assert set(seen) == {17 + 9 + 3}
    assert not hidden[~batch.attention_mask].any()
    assert hidden[batch.attention_mask].any(-1).all()


@pytest.mark.parametrize("low", [False, True])
def test_the_operand_of_a_joint_is_in_the_precision_of_the_products(low: bool) -> None:
    linear, norm = nn.Linear(24, 24, bias=False), nn.LayerNorm(24, bias=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        states = layers.linear_residual_norm(linear, torch.randn(5, 24), torch.randn(5, 24), norm, Dropout(0.0), keeps_sum=True)
    assert (states.values.dtype, states.operand.dtype) == (torch.float32, torch.bfloat16 if low else torch.float32)
