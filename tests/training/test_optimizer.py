import math

import pytest
import torch
from torch import nn

from discern.errors import CheckpointError
from discern.objectives import objectives
from discern.objectives.rtd import ReplacedTokenDetection, RTDConfig
from discern.training.config import OptimizerConfig
from discern.training.optimizer import AdamW, clip_gradients, parameter_groups
from discern.training.schedule import learning_rate
from tests.parity.small_xlnet import build_network
from tests.parity.small_xlnet import sizes as xlnet_sizes
from tests.support import MODELS, settings


def optimizer(parameter: nn.Parameter, **options: object) -> AdamW:
    config = OptimizerConfig(**options)  # type: ignore[arg-type]
    return AdamW([{"params": [parameter], "weight_decay": config.weight_decay}], config)


def test_updates_without_bias_correction_by_hand() -> None:
    # A constant gradient moves by lr (1 - 0.9^k) / sqrt(1 - 0.999^k) at update k: 3.162, 4.250, 4.950.
    parameter = nn.Parameter(torch.zeros(1))
    adam = optimizer(parameter, learning_rate=1e-3, weight_decay=0.0, bias_correction=False, epsilon=1e-12)
    for update in range(1, 4):
        before = parameter.item()
        parameter.grad = torch.ones(1)
        adam.step()
        expected = (1 - 0.9**update) / math.sqrt(1 - 0.999**update)
        assert (before - parameter.item()) / 1e-3 == pytest.approx(expected, rel=1e-4)
        assert expected == pytest.approx({1: 3.162, 2: 4.250, 3: 4.950}[update], abs=1e-3)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_with_bias_correction_it_is_torch_adamw(decay: float) -> None:
    torch.manual_seed(0)
    start = torch.randn(5, 3)
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours = optimizer(mine, learning_rate=1e-2, weight_decay=decay, epsilon=1e-6)
    reference = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=decay, eps=1e-6)
    for _ in range(20):
        mine.grad = torch.randn(5, 3)
        theirs.grad = mine.grad.clone()
        ours.step()
        reference.step()
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_epsilon_stands_outside_the_root() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    adam = optimizer(parameter, learning_rate=1.0, weight_decay=0.0, bias_correction=False, epsilon=0.5)
    parameter.grad = torch.ones(1)
    adam.step()
    assert -parameter.item() == pytest.approx(0.1 / (math.sqrt(0.001) + 0.5), rel=1e-5)


def test_state_goes_round_through_tensors() -> None:
    torch.manual_seed(0)
    gradients = torch.randn(6, 4)

    def run(interrupted: bool) -> torch.Tensor:
        parameter = nn.Parameter(torch.ones(4))
        adam = optimizer(parameter)
        for number, gradient in enumerate(gradients):
            if interrupted and number == 3:
                saved = {key: value.clone() for key, value in adam.tensors({parameter: "w"}).items()}
                adam, updates = optimizer(parameter), adam.updates
                adam.load_tensors(saved, {parameter: "w"}, updates)
            parameter.grad = gradient.clone()
            adam.step()
        return parameter.detach()

    assert torch.equal(run(False), run(True))


def test_foreign_state_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(4))
    with pytest.raises(CheckpointError, match=r"other\.mean"):
        optimizer(parameter).load_tensors({"other.mean": torch.ones(4)}, {parameter: "w"}, 1)


@pytest.mark.parametrize("name", objectives.names())
def test_every_parameter_is_in_one_group(name: str) -> None:
    factory = objectives.load(name)
    objective = factory(factory.Config(), settings(**MODELS.get(name, {})))
    groups = parameter_groups(objective, OptimizerConfig(layer_decay=0.8))
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in objective.parameters())
    decayed = {id(p) for group in groups for p in group["params"] if group["weight_decay"]}
    for key, parameter in objective.named_parameters():
        # XLNet's biases of attention are matrices, one a head, and decayed as such.
        vector = (key.endswith("bias") and parameter.ndim == 1) or "norm" in key
        assert (id(parameter) in decayed) != vector, key


def test_layer_decay_by_hand() -> None:
    objective = ReplacedTokenDetection(RTDConfig(), settings(num_layers=2))
    groups = parameter_groups(objective, OptimizerConfig(layer_decay=0.5))
    scale = {id(p): group["scale"] for group in groups for p in group["params"]}
    named = dict(objective.named_parameters())
    expected = {
        "discriminator_head.dense.weight": 1.0,
        "discriminator.blocks.1.expand.weight": 0.5,
        "discriminator.blocks.0.expand.weight": 0.25,
        "discriminator.embeddings.word.weight": 0.125,
        "discriminator.projection.weight": 0.125,
    }
    assert {key: scale[id(named[key])] for key in expected} == expected


def test_layers_of_a_shallower_generator_are_counted_from_its_own_head() -> None:
    model = settings(num_layers=4)
    objective = ReplacedTokenDetection(RTDConfig(generator_depth=0.5, tying="token"), model)
    groups = parameter_groups(objective, OptimizerConfig(layer_decay=0.5))
    scale = {id(p): group["scale"] for group in groups for p in group["params"]}
    named = dict(objective.named_parameters(remove_duplicate=False))
    shared = next(key for key in named if key.endswith("embeddings.word.weight"))
    expected = {
        "discriminator.blocks.3.expand.weight": 0.5,
        "discriminator.blocks.0.expand.weight": 0.5**4,
        shared: 0.5**5,
    }
    expected |= {
        key: 0.5 ** (2 - int(key.split("blocks.")[1][0]))
        for key in named
        if "generator" in key and key.endswith("expand.weight") and "blocks" in key
    }
    assert len(expected) == 5
    assert {key: scale[id(named[key])] for key in expected} == expected


def test_clipping_scales_all_gradients_together() -> None:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert clip_gradients([first, second], 1.0).item() == pytest.approx(5.0)
    assert first.grad.item() == pytest.approx(0.6, rel=1e-5)
    before = second.grad.clone()
    clip_gradients([first, second], 2.0)
    assert torch.equal(second.grad, before), "a norm within the limit is left alone to the last bit"


def rates(schedule: str, steps: list[int], **options: object) -> list[float]:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10, schedule=schedule, **options)  # type: ignore[arg-type]
    return [learning_rate(config, step, 100) for step in steps]


def test_linear_schedule() -> None:
    assert rates("linear", [0, 4, 9, 10, 55, 99, 100]) == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.5, 1 / 90, 0.0])


def test_released_schedule_multiplies_warmup_and_decay() -> None:
    assert rates("released", [0, 5, 10, 50, 100]) == pytest.approx([0.0, 0.5 * 0.95, 0.9, 0.5, 0.0])


def test_constant_schedule() -> None:
    assert rates("constant", [0, 9, 50, 99]) == pytest.approx([0.1, 1.0, 1.0, 1.0])


def test_a_time_budget_ends_the_decay_when_the_time_does() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0)
    found = [learning_rate(config, 1000, 10**6, time_used) for time_used in (0.25, 0.5, 1.0)]
    assert found == pytest.approx([0.75, 0.5, 0.0])


def test_a_warmup_longer_than_the_run_is_not_an_error() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=1000)
    assert learning_rate(config, 99, 100) == pytest.approx(0.1)


def test_layer_decay_of_an_xlnet_by_hand() -> None:
    """Its biases of attention are decayed, as in the released code; what queries start from goes with the embeddings."""
    network = build_network(xlnet_sizes(num_layers=2))
    model = torch.nn.ModuleDict({"encoder": network.encoder, "head": network.head})
    groups = parameter_groups(model, OptimizerConfig(layer_decay=0.5, weight_decay=0.1))
    found = {id(p): (group["scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    expected = {
        "head.bias": (1.0, 0.0),
        "encoder.blocks.1.attention.position.weight": (0.5, 0.1),
        "encoder.blocks.1.attention.content_bias": (0.5, 0.1),
        "encoder.blocks.0.attention.segments": (0.25, 0.1),
        "encoder.blocks.0.expand.bias": (0.25, 0.0),
        "encoder.embeddings.word.weight": (0.125, 0.1),
        "encoder.query_embedding": (0.125, 0.1),
    }
    named = dict(model.named_parameters())
    assert {key: found[id(named[key])] for key in expected} == expected
