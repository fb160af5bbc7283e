"""Updates on a device that are held back because the gradient is not finite."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from discern.corruption.randomness import Randomness
from discern.errors import NumericsError
from discern.objectives.rtd import ReplacedTokenDetection, RTDConfig
from discern.training import checkpoint
from discern.training.config import OptimizerConfig
from discern.training.distributed import Ranks
from discern.training.loop import train
from discern.training.optimizer import Optimizer, parameter_groups
from discern.training.state import State
from discern.types import CorruptedBatch, StepOutput
from tests.support import settings
from tests.training.test_loop import build, context, weights

YES, NO = torch.tensor(True), torch.tensor(False)


def with_gradients(model: nn.Module, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=rng)


@pytest.mark.parametrize(("name", "bias_correction"), [("adamw", True), ("adamw", False), ("stable-adamw", True), ("muon", True)])
def test_an_update_that_is_allowed_is_the_ordinary_one_and_one_that_is_not_changes_nothing(
    name: Any, bias_correction: bool
) -> None:
    config = OptimizerConfig(name=name, learning_rate=0.01, weight_decay=0.1, bias_correction=bias_correction)
    models = [build(0.0), build(0.0)]
    plain, deciding = (Optimizer(parameter_groups(model, config), config) for model in models)
    for seed in range(3):
        for model in models:
            with_gradients(model, seed)
        plain.step()
        deciding.step(allowed=YES)
    expected, before = map(weights, models)
    for key, value in before.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
    moments = {key: value.clone() for key, value in deciding.tensors().items()}
    with_gradients(models[1], 9)
    for number, parameter in enumerate(models[1].parameters()):
        assert parameter.grad is not None
        parameter.grad.view(-1)[0] = (math.nan, math.inf, -math.inf)[number % 3]
    deciding.step(allowed=NO)
    assert all(torch.equal(value, before[key]) for key, value in weights(models[1]).items())
    assert all(torch.equal(value, moments[key]) for key, value in deciding.tensors().items())


class Breaks(ReplacedTokenDetection):
    """Its loss is not a number at step 5."""

    def forward(self, batch: CorruptedBatch, randomness: Randomness) -> StepOutput:
        output = super().forward(batch, randomness)
        if randomness.step == 5:
            output.terms["generator"].total.mul_(math.nan)
        return output


def test_a_device_holds_back_what_follows_and_the_host_names_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device, the host reads values only when it logs."""
    monkeypatch.setattr(Ranks, "reads_freely", False)
    objective = Breaks(RTDConfig(), settings())
    objective.initialize(0)
    run = context(tmp_path / "run", objective, log_every_steps=8, checkpoint_every_steps=7, weight_average=0.9)
    with pytest.raises(NumericsError, match=r"step 5: the gradient is not finite; losses loss nan.*examples 40 to 47"):
        train(run, State())
    # No checkpoint has a step after the failed one, and the kept weights are those before it.
    assert not (tmp_path / "run" / "checkpoints").exists()
    failed = checkpoint.load(tmp_path / "run" / "debug" / "step-00000005")
    assert (failed.state["step"], failed.state["updates"]) == (5, 5)
    train(context(tmp_path / "shorter", checkpoint_every_steps=5, keep_checkpoints=9), State())
    reference = checkpoint.load(tmp_path / "shorter" / "checkpoints" / "step-00000005")
    assert failed.state["tokens"] == reference.state["tokens"]
    for part in ("model", "optimizer"):
        expected, result = getattr(reference, part), getattr(failed, part)
        assert all(torch.equal(expected[key], result[key]) for key in expected), part
    assert json.loads((tmp_path / "run" / "debug" / "failure.json").read_text())["examples"] == [40, 48]
