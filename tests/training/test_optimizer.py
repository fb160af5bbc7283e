import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from discern.errors import CheckpointError, ConfigError
from discern.models.base import build_embeddings, build_encoder
from discern.models.config import build_config
from discern.models.electra.encoder import BertEncoder
from discern.models.heads import PredictionLayers
from discern.objectives import objectives
from discern.objectives.rtd import ReplacedTokenDetection, RTDConfig
from discern.training.config import OptimizerConfig
from discern.training.optimizer import Optimizer, clip_gradients, counts_by_rule, hidden_matrices, parameter_groups
from discern.training.schedule import learning_rate, overlap
from discern.training.update_rules import Muon, UpdateRule, orthogonalized
from tests.parity.small_xlnet import build_network
from tests.parity.small_xlnet import sizes as xlnet_sizes
from tests.support import MODELS, settings


def optimizer(parameter: nn.Parameter, **options: object) -> Optimizer:
    config = OptimizerConfig(**options)  # type: ignore[arg-type]
    return Optimizer([{"params": [parameter], "weight_decay": config.weight_decay}], config)


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


def test_wsd_schedule_by_hand() -> None:
    # Warm-up of 10, stable until 80, then 1 - sqrt(progress): at 85 a quarter of the decay is over, at 99 19/20 of it.
    expected = [0.1, 0.5, 1.0, 1.0, 1.0, 0.5, 1 - math.sqrt(19 / 20), 0.0]
    assert rates("wsd", [0, 4, 9, 50, 80, 85, 99, 100]) == pytest.approx(expected)
    assert rates("wsd", [89, 90, 95], decay_steps=10) == pytest.approx([1.0, 1.0, 1 - math.sqrt(0.5)])
    assert rates("wsd", [9, 50], decay_steps=1000) == pytest.approx([1 - math.sqrt(0.09), 1 - math.sqrt(0.5)])


def test_wsd_decays_over_its_fraction_of_a_time_budget() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, schedule="wsd", decay_fraction=0.2)
    found = [learning_rate(config, 1000, 10**6, time_used) for time_used in (0.25, 0.8, 0.85, 1.0)]
    assert found == pytest.approx([1.0, 1.0, 0.5, 0.0], abs=1e-6)


def test_the_stable_part_of_wsd_is_constant() -> None:
    assert rates("wsd", list(range(81))) == rates("constant", list(range(81)))


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({"warmup_steps": 800}, True),
        ({"warmup_steps": 801}, False),
        ({"warmup_steps": 0.7, "decay_steps": 301}, False),
        ({"warmup_steps": 900, "decay_steps": 100}, True),
        ({"warmup_steps": 801, "schedule": "linear"}, True),
    ],
)
def test_warm_up_and_decay_have_to_fit_into_the_run(options: dict[str, Any], fits: bool) -> None:
    assert (overlap(OptimizerConfig(**{"schedule": "wsd", **options}), 1000) is None) == fits


def test_a_time_budget_ends_the_decay_when_the_time_does() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0)
    found = [learning_rate(config, 1000, 10**6, time_used) for time_used in (0.25, 0.5, 1.0)]
    assert found == pytest.approx([0.75, 0.5, 0.0])


def test_a_warmup_longer_than_the_run_is_not_an_error() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=1000)
    assert learning_rate(config, 99, 100) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["linear", "released", "constant", "wsd"])
def test_a_warm_up_takes_a_tenth_of_the_time_at_most(schedule: Any) -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10_000, schedule=schedule)
    rates = [learning_rate(config, step, 10**6, step / 80) for step in range(80)]
    assert max(rates) >= 0.9
    assert rates.index(max(rates)) == 8
    assert learning_rate(config, 4, 10**6, 0.05) == pytest.approx(0.5, rel=0.06)
    assert learning_rate(config, 9_999, 10**6, 0.01) == pytest.approx(1, rel=0.02)  # whichever comes first


def test_layer_decay_of_a_modernbert_by_hand() -> None:
    """The LayerNorm of the embeddings goes with them, the final one with the heads."""
    config = build_config(encoder="modernbert", num_layers=2, hidden_size=32, embedding_size=32)
    encoder = build_encoder(build_embeddings(50, 32, config), config)
    model = torch.nn.ModuleDict({"encoder": encoder, "head": PredictionLayers(config)})
    groups = parameter_groups(model, OptimizerConfig(layer_decay=0.5))
    found = {id(p): group["scale"] for group in groups for p in group["params"]}
    expected = {
        "head.dense.weight": 1.0,
        "encoder.final_norm.weight": 1.0,
        "encoder.blocks.1.attention_norm.weight": 0.5,
        "encoder.blocks.0.attention.query.weight": 0.25,
        "encoder.embedding_norm.weight": 0.125,
        "encoder.embeddings.word.weight": 0.125,
    }
    named = dict(model.named_parameters())
    assert {key: found[id(named[key])] for key in expected} == expected


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


def matrix_rule(parameter: nn.Parameter, rule: UpdateRule, **options: Any) -> Optimizer:
    config = OptimizerConfig(**options)
    return Optimizer([{"params": [parameter], "weight_decay": config.weight_decay, "rule": rule}], config)


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24), (128, 128), (256, 128)])
def test_muon_maps_singular_values_by_its_polynomial(shape: tuple[int, int]) -> None:
    # In exact arithmetic five iterations of a x + b x^3 + c x^5 apply to each singular value of the normalized matrix.
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = starts = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    large = starts > 0.0015
    assert large.all() == (shape != (128, 128)), "only random square matrices have tiny singular values, if they are not small"
    assert values.max() < 1.21
    assert values[large].min() > 0.68
    assert (values <= 485 * starts).all()
    found = orthogonalized(matrix[None], torch.float32)[0]
    torch.testing.assert_close(found.double(), left @ torch.diag(values) @ right, rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", [(12, 6), (6, 12)])
def test_muon_equals_that_of_torch(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    start = torch.randn(shape)
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours = matrix_rule(mine, Muon(precision="bfloat16"), learning_rate=1e-2, weight_decay=0.1)  # torch's is always in bfloat16
    reference = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(10):
        mine.grad = torch.randn(shape)
        theirs.grad = mine.grad.clone()
        ours.step()
        reference.step()
    assert (start - theirs).abs().max() > 0.03
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


def test_an_update_of_muon_is_as_large_as_one_of_adamw() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(64, 32))
    muon = matrix_rule(parameter, Muon(), learning_rate=1e-3, weight_decay=0.0)
    parameter.grad = torch.randn(64, 32)
    muon.step()
    # All singular values near 1: RMS 0.2 sqrt(64) sqrt(32 / (64 * 32)) = 0.2, whatever the scale of the gradient.
    assert parameter.detach().square().mean().sqrt().item() == pytest.approx(0.2e-3, rel=0.15)


def test_stacked_matrices_are_orthogonalized_apart() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(4, 8) * scale for scale in (1.0, 100.0, 0.01)]
    apart = [nn.Parameter(torch.zeros(4, 8)) for _ in gradients]
    for parameter, gradient in zip(apart, gradients, strict=True):
        parameter.grad = gradient
        matrix_rule(parameter, Muon(), weight_decay=0.0).step()
    together = nn.Parameter(torch.zeros(12, 8))
    together.grad = torch.cat(gradients)
    matrix_rule(together, Muon(parts=3), weight_decay=0.0).step()
    torch.testing.assert_close(together, torch.cat([each.detach() for each in apart]), rtol=1e-5, atol=1e-8)


def test_weights_that_muon_cannot_update_are_refused() -> None:
    for shape, parts, reason in (((8,), 1, "1 dimension"), ((2, 4, 4), 1, "3 dimensions"), ((8, 4), 3, "8 rows")):
        with pytest.raises(ConfigError, match=reason):
            matrix_rule(nn.Parameter(torch.zeros(shape)), Muon(parts))
    with pytest.raises(ConfigError, match="no hidden matrix") as caught:
        parameter_groups(nn.Embedding(4, 4), OptimizerConfig(name="muon"))
    assert "optimizer.name=adamw" in (caught.value.hint or "")


@pytest.mark.parametrize("name", objectives.names())
def test_muon_gets_the_hidden_matrices_and_adamw_the_rest(name: str) -> None:
    factory = objectives.load(name)
    objective = factory(factory.Config(), settings(**MODELS.get(name, {})))
    config = OptimizerConfig(name="muon", layer_decay=0.8)
    groups = parameter_groups(objective, config)
    found = {id(p): group["rule"].name for group in groups for p in group["params"]}
    assert len(found) == sum(len(group["params"]) for group in groups) == len(list(objective.parameters()))
    others = re.compile(r"embeddings|bias|norm|query_embedding|segments|output\.weight$|gate\.weight$")
    for key, parameter in objective.named_parameters():
        inner = "blocks" in key and key.endswith("output.weight")
        assert found[id(parameter)] == ("adamw" if others.search(key) and not inner else "muon"), key
    counts = counts_by_rule(objective, config)
    assert sum(each["parameters"] for each in counts.values()) == sum(p.numel() for p in objective.parameters())

    def scales(name: str) -> dict[int, float]:
        groups = parameter_groups(objective, OptimizerConfig(name=name, layer_decay=0.8))  # type: ignore[arg-type]
        return {id(p): group["scale"] for group in groups for p in group["params"]}

    assert scales("muon") == scales("adamw")


def test_an_encoder_tells_which_layers_hold_several_matrices() -> None:
    class Stacked(BertEncoder):
        def stacked_layers(self) -> dict[nn.Linear, int]:
            return {block.expand: 4 for block in self.blocks}  # type: ignore[union-attr, misc]

    network = settings(num_layers=1)
    encoder = Stacked(build_embeddings(50, 8, network.model), network.model)
    matrices = hidden_matrices(nn.ModuleDict({"encoder": encoder}))
    names = {parameter: name for name, parameter in encoder.named_parameters()}
    assert {names[parameter]: parts for parameter, parts in matrices.items() if parts > 1} == {"blocks.0.expand.weight": 4}


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
    assert sizes[0] == pytest.approx(1.0)
    assert sizes[1] > 1.3


def test_stable_adamw_equals_adamw_while_gradients_stay_within_their_usual_size() -> None:
    torch.manual_seed(0)
    first, second = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))
    stable, plain = optimizer(first, name="stable-adamw"), optimizer(second)
    for update in range(5):
        first.grad = torch.randn(4, 3) / (1 + update) ** 2
        second.grad = first.grad.clone()
        stable.step()
        plain.step()
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["muon", "stable-adamw"])
def test_the_state_of_every_optimizer_goes_round_through_tensors(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))
    names = {parameter: key for key, parameter in model.named_parameters()}
    config = OptimizerConfig(name=name)  # type: ignore[arg-type]

    def run(interrupted: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        nn.utils.vector_to_parameters(torch.ones(27), model.parameters())
        current = Optimizer(parameter_groups(model, config), config)
        for number in range(6):
            if interrupted and number == 3:
                saved = {key: value.clone() for key, value in current.tensors(names).items()}
                updates, current = current.updates, Optimizer(parameter_groups(model, config), config)
                current.load_tensors(saved, names, updates)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape)
            current.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    assert all(torch.equal(first, second) for first, second in zip(run(False), run(True), strict=True))


def test_the_state_of_another_optimizer_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    saved = {"w.mean": torch.ones(4, 4), "w.square": torch.ones(4, 4)}
    with pytest.raises(CheckpointError, match=r"'w\.mean', but the weight is updated by 'muon'"):
        matrix_rule(parameter, Muon()).load_tensors(saved, {parameter: "w"}, 1)
    with pytest.raises(CheckpointError, match=r"no 'w\.square'"):
        optimizer(parameter).load_tensors({"w.mean": torch.ones(4, 4)}, {parameter: "w"}, 1)
