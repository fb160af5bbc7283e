"""Weights in bfloat16: rounding at random has no bias, small updates count, and a run resumes to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from discern.errors import ConfigError, NumericsError
from discern.objectives.base import Objective
from discern.pretraining.bench import META, meta_step
from discern.training import checkpoint, optimizer
from discern.training.config import OptimizerConfig, TrainConfig
from discern.training.distributed import Ranks
from discern.training.loop import train
from discern.training.optimizer import Optimizer
from discern.training.precision import check_weight_precision, lower_weights, matrices, raise_weights, rounded_at_random
from discern.training.state import State, TrainContext
from tests.training import test_loop, test_meta_step
from tests.training.no_waits import no_waits

KINDS = ("bfloat16", "bfloat16-masters")
SPACING = 2.0**-7  # of bfloat16 between 1 and 2


def test_rounding_at_random_has_no_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    for share, sign in ((0.25, 1.0), (0.9, -1.0)):
        rounded = rounded_at_random(torch.full((100_000,), sign * (1 + share * SPACING)), generator).double()
        assert set(rounded.unique().tolist()) == {sign, sign * (1 + SPACING)}
        ups = (rounded.abs() > 1).double().mean().item()
        assert ups == pytest.approx(share, abs=5 * (share * (1 - share) / 100_000) ** 0.5)
    values = torch.cat([torch.randn(1000, generator=generator).bfloat16().float(), torch.zeros(2)])
    assert torch.equal(rounded_at_random(values).float(), values), "what bfloat16 has is not rounded"


def updated(kind: str) -> Tensor:
    """Weights of 1 after 200 updates of a constant gradient; with bias correction, each is the learning rate."""
    model = nn.Linear(64, 64, bias=False)
    nn.init.ones_(model.weight)
    config = OptimizerConfig(learning_rate=1e-4, weight_decay=0.0, epsilon=1e-12)
    masters = lower_weights(model, kind)
    rule = Optimizer([{"params": list(model.parameters())}], config, masters, seed=3)
    for _ in range(200):
        model.weight.grad = torch.ones_like(model.weight, dtype=torch.float32)
        rule.step()
    raise_weights(model, masters)
    return model.weight.detach()


def test_small_updates_count_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = 1 - 200 * 1e-4
    assert updated("bfloat16-masters").mean().item() == pytest.approx(exact, abs=1e-5)
    # 4,096 random walks of 200 steps, each of at most the spacing below 1, with probability 0.0256.
    deviation = (200 * 0.0256 / 4096) ** 0.5 * SPACING / 2
    assert updated("bfloat16").mean().item() == pytest.approx(exact, abs=5 * deviation)
    monkeypatch.setattr(optimizer, "rounded_at_random", lambda values, generator: values.bfloat16())
    assert updated("bfloat16").mean().item() == 1.0  # to the nearest: no update is large enough


def test_only_matrices_are_stored_in_bfloat16() -> None:
    objective = test_loop.build()
    before = {name: tensor.clone() for name, tensor in checkpoint.model_tensors(objective).items()}
    masters = lower_weights(objective, "bfloat16-masters")
    low = {name for name, parameter in objective.named_parameters() if parameter.dtype == torch.bfloat16}
    assert len(low) == len(matrices(objective)) == len(masters)
    assert {name.rpartition(".")[2] for name in low} == {"weight"}
    assert all(before[name].ndim == 2 for name in low)
    assert all(tensor.ndim < 2 for name, tensor in before.items() if name not in low)
    raise_weights(objective, masters)
    assert all(torch.equal(tensor, before[name]) for name, tensor in checkpoint.model_tensors(objective).items())


def run_context(folder: Path, kind: str, objective: Objective | None = None, **options: Any) -> TrainContext:
    given = {"precision": "bfloat16", "weight_precision": kind} | options
    return replace(test_loop.context(folder, objective, **given), precision="bfloat16")


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("rtd", "bfloat16", {"weight_average": 0.9, "micro_batch_size": 3, "optimizer": {"name": "muon"}}),
        ("rtd", "bfloat16-masters", {"weight_average": 0.9, "optimizer": {"name": "stable-adamw", "clip_norm": 0.0}}),
        ("rtd-two-stage", "bfloat16-masters", {}),
        ("rtd-disentangled", "bfloat16", {}),
    ],
)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, name: str, kind: str, options: dict[str, Any]) -> None:
    options = {"max_steps": 4, "checkpoint_every_steps": 2} | options
    whole, state = run_context(tmp_path / "whole", kind, test_meta_step.build(name), **options), State()
    train(whole, state)
    assert state.masters == {}
    contents = checkpoint.load(tmp_path / "whole" / "checkpoints" / "step-00000002")
    assert all(tensor.dtype == torch.float32 for tensor in contents.model.values() if tensor.is_floating_point())
    rest = run_context(tmp_path / "rest", kind, test_meta_step.build(name), **options)
    checkpoint.load_model_tensors(rest.objective, contents.model, "here")
    rest.objective.load_carry_state(contents.carry)
    train(rest, State.from_checkpoint(contents))
    one, other = (checkpoint.load(tmp_path / folder / "checkpoints" / "step-00000004") for folder in ("whole", "rest"))
    for there, here in ((one.model, other.model), (one.optimizer, other.optimizer), (one.average, other.average)):
        assert there.keys() == here.keys()
        assert all(torch.equal(there[key], here[key]) for key in there), name
    low = [one.model[key] for key in one.model if key.endswith("dense.weight")]
    assert all(torch.equal(tensor, tensor.bfloat16().float()) == (kind == "bfloat16") for tensor in low)
    # The weights of the run's end are those of its checkpoint.
    assert all(torch.equal(tensor, one.model[key]) for key, tensor in checkpoint.model_tensors(whole.objective).items())


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_is_held_back_changes_no_bit(kind: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    masters = lower_weights(model, kind)
    current = Optimizer([{"params": list(model.parameters())}], OptimizerConfig(), masters)
    for allowed in (True, False):
        before = [parameter.detach().clone() for parameter in (*model.parameters(), *masters.values())]
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 if allowed else float("nan"), dtype=torch.float32)
        current.step(allowed=torch.tensor(allowed))
        after = [*model.parameters(), *masters.values()]
        assert all(torch.equal(old, new) != allowed for old, new in zip(before, after, strict=True))


def test_a_gradient_that_is_not_finite_keeps_the_weights_before(tmp_path: Path) -> None:
    run = run_context(tmp_path, "bfloat16-masters", optimizer={"learning_rate": 1e30, "warmup_steps": 0})
    with pytest.raises(NumericsError):
        train(run, State())
    (folder,) = checkpoint.found(tmp_path / "debug")
    assert checkpoint.load(folder).model.keys() == checkpoint.model_tensors(run.objective).keys()
    assert all(parameter.dtype == torch.float32 for parameter in run.objective.parameters())


@pytest.mark.parametrize(("name", "kind"), [("rtd-disentangled", "bfloat16"), ("rtd-muon", "bfloat16-masters")])
def test_the_host_never_waits_in_a_step(name: str, kind: str) -> None:
    run = test_meta_step.context(name, META, precision="bfloat16", weight_average=0.9, micro_batch_size=4)
    run = replace(run, train=run.train.model_copy(update={"weight_precision": kind}))
    meta_step(run, run.objective.phases(20)[0], around=no_waits())


def test_weights_in_bfloat16_need_products_in_bfloat16() -> None:
    for precision in ("auto", "float32"):
        with pytest.raises(ValueError, match=r"set train.precision=bfloat16"):
            TrainConfig(weight_precision="bfloat16", precision=precision)


def test_divided_weights_are_refused() -> None:
    two = Ranks(0, 2, torch.device("cpu"))
    low = {"weight_precision": "bfloat16", "precision": "bfloat16"}
    with pytest.raises(ConfigError, match=r"does not work with train\.parallel='fsdp'"):
        check_weight_precision(TrainConfig(**low, parallel="fsdp"), two)  # type: ignore[arg-type]
    check_weight_precision(TrainConfig(**low), two)  # type: ignore[arg-type]
    check_weight_precision(TrainConfig(), two)
