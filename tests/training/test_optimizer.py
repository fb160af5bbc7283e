import math
import re
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from discern.errors import ConfigError
from discern.models.base import build_embeddings, build_encoder
from discern.models.config import build_config
from discern.models.heads import PredictionLayers
from discern.objectives import objectives
from discern.training.config import OptimizerConfig, learning_rate
from discern.training.optimizer import (
    Muon,
    Optimizer,
    clip_gradients,
    counts_by_rule,
    hidden_matrices,
    orthogonalized,
    parameter_groups,
)
from tests.objectives.rtd_options import build_option
from tests.parity.small_xlnet import build_network, sizes as xlnet_sizes
from tests.support import MODELS, settings

Name = Literal["adamw", "muon", "stable-adamw"]


def optimizer(parameter: nn.Parameter, muon: Muon | None = None, **options: Any) -> Optimizer:
    config = OptimizerConfig(**options)
    return Optimizer([{"params": [parameter]} | ({"rule": muon} if muon else {})], config)


@pytest.mark.parametrize("epsilon", [1e-12, 0.5])
def test_updates_without_bias_correction_by_hand(epsilon: float) -> None:
    parameter, expected = nn.Parameter(torch.zeros(1)), 0.0
    adam = optimizer(parameter, learning_rate=1e-3, weight_decay=0.0, bias_correction=False, epsilon=epsilon)
    for update in range(1, 4):
        parameter.grad = torch.ones(1)
        adam.step()
        expected -= 1e-3 * (1 - 0.9**update) / (math.sqrt(1 - 0.999**update) + epsilon)
        assert parameter.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("name", "shape"), [("adamw", (5, 3)), ("stable-adamw", (5, 3)), ("muon", (12, 6)), ("muon", (6, 12))])
def test_updates_are_those_of_torch(name: Name, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    start = torch.randn(shape)
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    muon = Muon(precision="bfloat16") if name == "muon" else None  # torch's is always in bfloat16
    ours = optimizer(mine, muon, name=name, learning_rate=1e-2, weight_decay=0.1)
    reference: torch.optim.Optimizer = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1, eps=1e-6)
    if muon:
        reference = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for update in range(10):
        # StableAdamW is AdamW as long as gradients stay within their usual size.
        mine.grad = torch.randn(shape) / (1 + update) ** 2
        theirs.grad = mine.grad.clone()
        ours.step()
        reference.step()
    assert (start - theirs).abs().max() > 0.02
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4 if muon else 1e-6)


def test_stable_adamw_by_hand() -> None:
    # Two updates, the second with a gradient ten times as large: g / sqrt(v) is beyond 1, and the rate is divided by its RMS.
    parameter = nn.Parameter(torch.tensor([1.0, -1.0]))
    stable = optimizer(parameter, name="stable-adamw", learning_rate=0.1, weight_decay=0.5, beta2=0.99, epsilon=1e-8)
    value, mean, square = np.array([1.0, -1.0]), np.zeros(2), np.zeros(2)
    sizes = []
    for update, gradient in enumerate((np.array([1.0, 2.0]), np.array([10.0, -20.0])), start=1):
        parameter.grad = torch.tensor(gradient, dtype=torch.float32)
        stable.step()
        mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
        corrected = square / (1 - 0.99**update)
        sizes.append(np.sqrt(np.mean((gradient / np.sqrt(corrected)) ** 2)))
        rate = 0.1 / max(1, sizes[-1])
        value = value * (1 - rate * 0.5) - rate * (mean / (1 - 0.9**update)) / np.sqrt(corrected)
        np.testing.assert_allclose(parameter.detach().numpy(), value, rtol=1e-5)
    assert sizes[1] > 1.3


@pytest.mark.parametrize("shape", [(24, 8), (128, 128)])
def test_muon_maps_singular_values_by_its_polynomial(shape: tuple[int, int]) -> None:
    # In exact arithmetic five iterations of a x + b x^3 + c x^5 apply to each singular value of the normalized matrix.
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = starts = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    assert values.max() < 1.21
    assert values[starts > 0.0015].min() > 0.68
    assert (values <= 485 * starts).all()
    result = orthogonalized(matrix[None], torch.float32)[0]
    torch.testing.assert_close(result.double(), left @ torch.diag(values) @ right, rtol=0, atol=2e-5)


def test_stacked_matrices_are_orthogonalized_separately() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(4, 8) * scale for scale in (1.0, 100.0, 0.01)]

    def updated(gradient: torch.Tensor, parts: int) -> torch.Tensor:
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        optimizer(parameter, Muon(parts), weight_decay=0.0).step()
        return parameter.detach()

    expected = torch.cat([updated(gradient, 1) for gradient in gradients])
    torch.testing.assert_close(updated(torch.cat(gradients), 3), expected, rtol=1e-5, atol=1e-8)


def test_a_model_without_matrices_is_refused_with_muon() -> None:
    with pytest.raises(ConfigError, match="no hidden matrix") as caught:
        parameter_groups(nn.Embedding(4, 4), OptimizerConfig(name="muon"))
    assert "optimizer.name=adamw" in (caught.value.hint or "")


@pytest.mark.parametrize("name", objectives.names())
def test_every_parameter_is_in_one_group_of_its_rule_and_decay(name: str) -> None:
    factory = objectives.load(name)
    objective = factory(factory.Config(), settings(**MODELS.get(name, {})))
    others = re.compile(r"embeddings|bias|norm|query_embedding|segments|output\.weight$|gate\.weight$")
    scales = []
    for optimizer_name in ("adamw", "muon"):
        config = OptimizerConfig(name=optimizer_name, layer_decay=0.8)  # type: ignore[arg-type]
        groups = parameter_groups(objective, config)
        grouped = {id(parameter): group for group in groups for _, parameter in group["params"]}
        assert len(grouped) == sum(len(group["params"]) for group in groups) == len(list(objective.parameters()))
        for key, parameter in objective.named_parameters():
            group = grouped[id(parameter)]
            # XLNet's biases of attention are matrices, one a head, and decayed as such.
            assert bool(group["weight_decay"]) != ((key.endswith("bias") and parameter.ndim == 1) or "norm" in key), key
            hidden = not others.search(key) or ("blocks" in key and key.endswith("output.weight"))
            assert group["rule"].name == ("muon" if hidden and optimizer_name == "muon" else "adamw"), key
        counts = counts_by_rule(objective, config)
        assert sum(count["parameters"] for count in counts.values()) == sum(p.numel() for p in objective.parameters())
        scales.append({key: group["scale"] for key, group in grouped.items()})
    assert scales[0] == scales[1]


def modernbert() -> nn.Module:
    config = build_config(encoder="modernbert", num_layers=2, hidden_size=32, embedding_size=32)
    encoder = build_encoder(build_embeddings(50, 32, config), config)
    return nn.ModuleDict({"encoder": encoder, "head": PredictionLayers(config)})


def test_an_encoder_tells_which_layers_hold_several_matrices() -> None:
    model = modernbert()
    parts = {model.get_parameter(f"encoder.blocks.{block}.expand.weight"): 2 for block in range(2)}
    assert {parameter: count for parameter, count in hidden_matrices(model).items() if count > 1} == parts


def xlnet() -> nn.Module:
    network = build_network(xlnet_sizes(num_layers=2))
    return nn.ModuleDict({"encoder": network.encoder, "head": network.head})


@pytest.mark.parametrize(
    ("build", "depths"),
    [
        (
            lambda: build_option({}),
            {
                "discriminator_head.dense.weight": 0,
                "discriminator.blocks.1.expand.weight": 1,
                "discriminator.blocks.0.expand.weight": 2,
                "discriminator.embeddings.word.weight": 3,
                "discriminator.projection.weight": 3,
            },
        ),
        (  # layers of a shallower generator are counted from its own head, shared tables from that of the deeper network
            lambda: build_option({"generator_depth": 0.5, "tying": "token"}, num_layers=4),
            {
                "discriminator.blocks.3.expand.weight": 1,
                "discriminator.blocks.0.expand.weight": 4,
                "discriminator.embeddings.word.weight": 5,
                "generator.blocks.1.expand.weight": 1,
                "generator.blocks.0.expand.weight": 2,
            },
        ),
        (  # the LayerNorm of the embeddings goes with them, the final one with the heads
            modernbert,
            {
                "head.dense.weight": 0,
                "encoder.final_norm.weight": 0,
                "encoder.blocks.1.attention_norm.weight": 1,
                "encoder.blocks.0.attention.query.weight": 2,
                "encoder.embedding_norm.weight": 3,
                "encoder.embeddings.word.weight": 3,
            },
        ),
        (  # what queries start from goes with the embeddings
            xlnet,
            {
                "head.bias": 0,
                "encoder.blocks.1.attention.content_bias": 1,
                "encoder.blocks.0.attention.segments": 2,
                "encoder.embeddings.word.weight": 3,
                "encoder.query_embedding": 3,
            },
        ),
    ],
)
def test_layer_decay_by_hand(build: Callable[[], nn.Module], depths: dict[str, int]) -> None:
    model = build()
    groups = parameter_groups(model, OptimizerConfig(layer_decay=0.5))
    scales = {id(parameter): group["scale"] for group in groups for _, parameter in group["params"]}
    named = dict(model.named_parameters(remove_duplicate=False))
    assert {key: scales[id(named[key])] for key in depths} == {key: 0.5**depth for key, depth in depths.items()}


def test_clipping_scales_all_gradients_together() -> None:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert clip_gradients([first, second], 1.0).item() == pytest.approx(5.0)
    assert first.grad.item() == pytest.approx(0.6, rel=1e-5)
    before = second.grad.clone()
    clip_gradients([first, second], 2.0)
    assert torch.equal(second.grad, before), "a norm within the limit is left alone to the last bit"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "linear"}, {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 55: 0.5, 99: 1 / 90, 100: 0.0}),
        ({"schedule": "linear", "warmup_steps": 1000}, {99: 0.1}),
        ({"schedule": "released"}, {0: 0.0, 5: 0.5 * 0.95, 10: 0.9, 50: 0.5, 100: 0.0}),
        ({"schedule": "constant"}, {0: 0.1, 9: 1.0, 50: 1.0, 99: 1.0}),
        # Warm-up of 10, stable until 80, then 1 - sqrt(progress): at 85 a quarter of the decay is over, at 99 19/20 of it.
        ({}, {0: 0.1, 4: 0.5, 9: 1.0, 50: 1.0, 80: 1.0, 85: 0.5, 99: 1 - math.sqrt(19 / 20), 100: 0.0}),
        ({"decay_steps": 10}, {89: 1.0, 90: 1.0, 95: 1 - math.sqrt(0.5)}),
        ({"decay_steps": 1000}, {9: 1 - math.sqrt(0.09), 50: 1 - math.sqrt(0.5)}),
    ],
)
def test_schedules_by_hand(options: dict[str, Any], expected: dict[int, float]) -> None:
    config = OptimizerConfig(**({"learning_rate": 1.0, "warmup_steps": 10, "schedule": "wsd"} | options))
    assert [learning_rate(config, step, 100) for step in expected] == pytest.approx(list(expected.values()))


@pytest.mark.parametrize(
    ("schedule", "expected"), [("linear", {0.25: 0.75, 0.5: 0.5, 1.0: 0.0}), ("wsd", {0.25: 1.0, 0.8: 1.0, 0.85: 0.5, 1.0: 0.0})]
)
def test_a_decay_ends_with_the_time_budget(schedule: Any, expected: dict[float, float]) -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, schedule=schedule, decay_fraction=0.2)
    rates = [learning_rate(config, 1000, 10**6, time_used) for time_used in expected]
    assert rates == pytest.approx(list(expected.values()), abs=1e-6)


@pytest.mark.parametrize("schedule", ["linear", "released", "constant", "wsd"])
def test_a_warm_up_takes_a_tenth_of_the_time_at_most(schedule: Any) -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10_000, schedule=schedule)
    rates = [learning_rate(config, step, 10**6, step / 80) for step in range(80)]
    assert max(rates) >= 0.9
    assert rates.index(max(rates)) == 8
    assert rates[4] == pytest.approx(0.5, rel=0.06)
    assert learning_rate(config, 9_999, 10**6, 0.01) == pytest.approx(1, rel=0.02)  # whichever comes first
