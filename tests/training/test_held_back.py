"""Updates on a device: the fused kernel, and updates that are held back because the gradient is not finite."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from discern import kernels
from discern.corruption.randomness import Randomness
from discern.errors import NumericsError
from discern.objectives.base import Objective
from discern.objectives.rtd import ReplacedTokenDetection, RTDConfig
from discern.training import checkpoint
from discern.training.config import OptimizerConfig
from discern.training.distributed import Ranks
from discern.training.loop import train
from discern.training.metrics_log import read_metrics
from discern.training.optimizer import Optimizer, parameter_groups
from discern.training.state import State
from discern.training.update_rules import AdamW, Update
from discern.types import CorruptedBatch, StepOutput
from tests.support import settings
from tests.training.test_loop import build, context, weights

YES, NO = torch.tensor(True), torch.tensor(False)


def network() -> ReplacedTokenDetection:
    objective = ReplacedTokenDetection(RTDConfig(), settings())
    objective.initialize(0)
    return objective


def with_gradients(model: nn.Module, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=rng)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_the_fused_kernel_computes_the_same_update(bias_correction: bool) -> None:
    rule = AdamW(0.9, 0.98, 1e-4, bias_correction)
    ours, fused = (
        [[torch.ones(5, 3), torch.full((4,), -2.0)], [[torch.zeros(5, 3), torch.zeros(4)] for _ in range(2)]] for _ in range(2)
    )
    for update in range(1, 5):
        rng = torch.Generator().manual_seed(update)
        gradients = [torch.randn(5, 3, generator=rng), torch.randn(4, generator=rng)]
        rule.update(Update(ours[0], [each.clone() for each in gradients], ours[1], 0.01, 0.1, update))
        rule.update(Update(fused[0], [each.clone() for each in gradients], fused[1], 0.01, 0.1, update, YES))
        for one, other in zip((*ours[0], *ours[1][0], *ours[1][1]), (*fused[0], *fused[1][0], *fused[1][1]), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
    before = [each.clone() for each in (*fused[0], *fused[1][0], *fused[1][1])]
    rule.update(Update(fused[0], [torch.full((5, 3), math.nan), torch.ones(4)], fused[1], 0.01, 0.1, 5, NO))
    assert all(map(torch.equal, before, (*fused[0], *fused[1][0], *fused[1][1])))


@pytest.mark.parametrize("name", ["adamw", "stable-adamw", "muon"])
def test_an_update_that_is_allowed_is_the_ordinary_one_and_one_that_is_not_changes_nothing(name: str) -> None:
    config = OptimizerConfig(name=name, learning_rate=0.01, weight_decay=0.1)
    models = [network(), network()]
    plain, deciding = (Optimizer(parameter_groups(model, config), config) for model in models)
    for seed in range(3):
        for model in models:
            with_gradients(model, seed)
        with kernels.switched_off():
            plain.step()
        deciding.step(allowed=YES)
    expected, got = map(weights, models)
    for key, value in got.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
    names = {parameter: key for key, parameter in models[1].named_parameters()}
    moments = {key: value.clone() for key, value in deciding.tensors(names).items()}
    with_gradients(models[1], 9)
    for number, parameter in enumerate(models[1].parameters()):
        assert parameter.grad is not None
        parameter.grad.view(-1)[0] = (math.nan, math.inf, -math.inf)[number % 3]
    deciding.step(allowed=NO)
    assert all(torch.equal(value, got[key]) for key, value in weights(models[1]).items())
    assert all(torch.equal(value, moments[key]) for key, value in deciding.tensors(names).items())


class Breaks(ReplacedTokenDetection):
    """Its loss is not a number at step 5."""

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        output = super().forward(batch, randomness)
        if randomness.step == 5:
            output.terms["generator"].total.mul_(math.nan)
        return output


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train as on a device, whose values the host reads only when it logs."""
    monkeypatch.setattr(Ranks, "reads_freely", False)


@pytest.mark.usefixtures("deferred")
@pytest.mark.parametrize("checkpoint_every_steps", [7, 100])
def test_a_device_holds_back_what_follows_and_the_host_names_the_step(tmp_path: Path, checkpoint_every_steps: int) -> None:
    objective = Breaks(RTDConfig(), settings())
    objective.initialize(0)
    run = context(
        tmp_path / "run", objective, log_every_steps=8, checkpoint_every_steps=checkpoint_every_steps, weight_average=0.9
    )
    with pytest.raises(NumericsError, match=r"step 5: the gradient is not finite; losses loss nan.*examples 40 to 47"):
        train(run, State())
    # No checkpoint has a step after the failed one, and the kept weights are those before it.
    assert not (tmp_path / "run" / "checkpoints").exists()
    kept = checkpoint.load(tmp_path / "run" / "debug" / "step-00000005")
    assert (kept.state["step"], kept.state["updates"]) == (5, 5)
    shorter = context(tmp_path / "shorter", max_steps=12, checkpoint_every_steps=5, keep_checkpoints=9)
    train(shorter, State())
    reference = checkpoint.load(tmp_path / "shorter" / "checkpoints" / "step-00000005")
    assert kept.state["tokens"] == reference.state["tokens"]
    for part in ("model", "optimizer"):
        expected, got = getattr(reference, part), getattr(kept, part)
        assert all(torch.equal(expected[key], got[key]) for key in expected), part
    assert json.loads((tmp_path / "run" / "debug" / "failure.json").read_text())["examples"] == [40, 48]


def test_reading_only_the_records_of_the_log_changes_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[bool, tuple[list[dict[str, Any]], dict[str, Tensor]]] = {}
    for freely in (True, False):
        monkeypatch.setattr(Ranks, "reads_freely", freely)
        folder = tmp_path / str(freely)
        objective: Objective = build(dropout=0.0)
        train(context(folder, objective, evaluate_every_steps=8, micro_batch_size=4), State())
        found[freely] = read_metrics(folder), weights(objective)
    for one, other in zip(found[True][0], found[False][0], strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - {"seconds", "tokens_per_second", "peak_memory_bytes", "data_share", "device_share"}:
            assert other[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), (one["step"], key)
    for key, value in found[False][1].items():
        torch.testing.assert_close(value, found[True][1][key], rtol=1e-3, atol=1e-4)
