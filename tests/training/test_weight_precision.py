"""Weights in bfloat16: that rounding at random has no bias, and that a run with them learns, stops and resumes as any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from discern.data.batching.rows import build_packing
from discern.data.batching.stream import ExampleStream
from discern.data.config import DataConfig
from discern.errors import ConfigError, NumericsError
from discern.objectives import objectives
from discern.objectives.base import Objective
from discern.pretraining.bench import META, meta_step
from discern.training import checkpoint, loop, optimizer
from discern.training.config import OptimizerConfig, TrainConfig
from discern.training.distributed import Ranks
from discern.training.loop import train
from discern.training.metrics_log import read_metrics
from discern.training.optimizer import Optimizer
from discern.training.precision import check_weight_precision, lower_weights, matrices, raise_weights, rounded_at_random
from discern.training.state import State, TrainContext, save_checkpoint
from tests.golden.runs import text
from tests.support import SPECIAL, settings
from tests.training import test_loop, test_meta_step
from tests.training.no_waits import no_waits

KINDS = ("bfloat16", "bfloat16-masters")
SPACING = 2.0**-7  # of bfloat16 between 1 and 2


def test_rounding_at_random_has_no_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    for share in (0.25, 0.9):
        for sign in (1.0, -1.0):
            values = torch.full((100_000,), sign * (1 + share * SPACING))
            rounded = rounded_at_random(values, generator).double()
            assert set(rounded.unique().tolist()) == {sign, sign * (1 + SPACING)}
            ups = (rounded.abs() > 1).double().mean().item()
            assert ups == pytest.approx(share, abs=5 * (share * (1 - share) / 100_000) ** 0.5)


def test_what_bfloat16_has_is_not_rounded() -> None:
    values = torch.cat([torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16().float(), torch.zeros(2)])
    for _ in range(5):
        assert torch.equal(rounded_at_random(values).float(), values)


def updated(model: nn.Module, kind: str, updates: int) -> Tensor:
    """The weights after updates of a constant gradient; with bias correction, each is the learning rate."""
    config = OptimizerConfig(learning_rate=1e-4, weight_decay=0.0, epsilon=1e-12)
    masters = lower_weights(model, kind)
    rule = Optimizer([{"params": list(model.parameters())}], config, masters, seed=3)
    for _ in range(updates):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter, dtype=torch.float32)
        rule.step()
    raise_weights(model, masters)
    return next(model.parameters()).detach()


def test_small_updates_count_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        layer = nn.Linear(64, 64, bias=False)
        nn.init.ones_(layer.weight)
        return layer

    exact = 1 - 200 * 1e-4
    assert updated(model(), "float32", 200).mean().item() == pytest.approx(exact, abs=1e-5)
    assert updated(model(), "bfloat16-masters", 200).mean().item() == pytest.approx(exact, abs=1e-5)
    # 4,096 random walks of 200 steps, each of at most the spacing below 1, with probability 0.0256.
    assert updated(model(), "bfloat16", 200).mean().item() == pytest.approx(
        exact, abs=5 * (200 * 0.0256 / 4096) ** 0.5 * SPACING / 2
    )
    monkeypatch.setattr(optimizer, "rounded_at_random", lambda values, generator: values.bfloat16())
    assert updated(model(), "bfloat16", 200).mean().item() == 1.0  # to the nearest: no update is large enough


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


RUNS = [
    ("rtd", "bfloat16", {"weight_average": 0.9, "micro_batch_size": 3}),
    ("rtd", "bfloat16-masters", {"weight_average": 0.9}),
    ("rtd", "bfloat16", {"optimizer": {"name": "muon"}}),
    ("rtd", "bfloat16-masters", {"optimizer": {"name": "stable-adamw", "clip_norm": 0.0}}),
    ("rtd-two-stage", "bfloat16-masters", {}),
    ("rtd-disentangled", "bfloat16", {}),
    ("permutation-lm", "bfloat16", {"optimizer": {"name": "muon"}}),
]


@pytest.mark.parametrize(("name", "kind", "options"), RUNS)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, name: str, kind: str, options: dict[str, Any]) -> None:
    steps = {"max_steps": 4, "checkpoint_every_steps": 2, "log_every_steps": 1}

    def begun(folder: Path, contents: checkpoint.Contents | None = None, **more: Any) -> tuple[TrainContext, State]:
        objective = test_meta_step.build(name)
        if contents is not None:
            checkpoint.load_model_tensors(objective, contents.model, "here")
            objective.load_carry_state(contents.carry)
        data = {"packing": "two-part"} if name == "permutation-lm" else {}
        run = run_context(tmp_path / folder, kind, objective, **(steps | options | more))
        if data:
            run = replace(run, source=test_meta_step.context(name, torch.device("cpu")).source, heldout=None)
        return run, State() if contents is None else State.from_checkpoint(contents)

    whole, state = begun("whole")
    train(whole, state)
    assert state.masters == {}
    contents = checkpoint.load(tmp_path / "whole" / "checkpoints" / "step-00000002")
    assert all(tensor.dtype == torch.float32 for tensor in contents.model.values() if tensor.is_floating_point())
    rest, state = begun("rest", contents)
    train(rest, state)
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


def test_the_best_weights_keep_their_precision_while_an_evaluation_is_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_context(tmp_path, "bfloat16-masters", max_steps=1)
    before = {name: tensor.clone() for name, tensor in checkpoint.model_tensors(run.objective).items()}

    def best(context: TrainContext, state: State, moments: object) -> dict[str, float]:
        save_checkpoint(context, state, dict, tmp_path / "best")
        state.finished = True
        return {}

    monkeypatch.setattr(loop, "evaluate", best)
    state = State(pending={"evaluates": True, "line": {}})
    train(run, state)
    (kept,) = checkpoint.found(tmp_path / "best")
    saved = checkpoint.load(kept).model
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())
    assert state.masters == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_keeps_the_weights_before(tmp_path: Path, kind: str) -> None:
    run = run_context(tmp_path, kind, optimizer={"learning_rate": 1e30, "warmup_steps": 0})
    with pytest.raises(NumericsError):
        train(run, State())
    (kept,) = checkpoint.found(tmp_path / "debug")
    assert checkpoint.load(kept).model.keys() == checkpoint.model_tensors(run.objective).keys()
    assert all(parameter.dtype == torch.float32 for parameter in run.objective.parameters())


@pytest.mark.parametrize(
    ("name", "kind"),
    [("rtd-disentangled", KINDS[0]), ("electric", KINDS[0]), ("rtd-muon", KINDS[1]), ("rtd-stable-adamw", KINDS[0])],
)
def test_the_host_never_waits_in_a_step(name: str, kind: str) -> None:
    run = test_meta_step.context(name, META, precision="bfloat16", weight_average=0.9, micro_batch_size=4)
    train_config = run.train.model_copy(update={"weight_precision": kind})
    run = replace(run, train=train_config)
    (phase,) = run.objective.phases(20)
    meta_step(run, phase, around=no_waits())


def test_weights_in_bfloat16_need_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("discern.training.optimizer._MOST_AT_ONCE", 1000)  # for so small a network
    found = {}
    for kind in ("float32", *KINDS):
        run = test_meta_step.context("rtd", META, precision="bfloat16", sequences_per_step=1)
        run = replace(run, train=run.train.model_copy(update={"weight_precision": kind}))
        found[kind] = meta_step(run, run.objective.phases(20)[0])
    assert found["bfloat16"].flops == found["float32"].flops
    low = sum(weight.numel() for weight in matrices(test_meta_step.build("rtd")))
    assert found["float32"].peak_memory_bytes - found["bfloat16"].peak_memory_bytes > 1.5 * low
    assert found["bfloat16-masters"].peak_memory_bytes > found["bfloat16"].peak_memory_bytes


def losses(folder: Path, kind: str, seed: int) -> list[float]:
    """Training losses of a short run on text with something to learn; each is a mean over five steps."""
    factory = objectives.load("mlm")
    objective: Objective = factory(factory.Config(), settings(50))
    objective.initialize(seed)
    data = DataConfig(sequence_length=24)
    rows = ExampleStream(build_packing(text(), SPECIAL, data, 0, training=True), seed, shuffle=True)
    steps = {"max_steps": 40, "log_every_steps": 5, "checkpoint_every_steps": 1000, "seed": seed, "sequences_per_step": 16}
    run = run_context(folder, kind, objective, optimizer={"learning_rate": 1e-2, "warmup_steps": 5}, source=rows, **steps)
    train(replace(run, heldout=None), State())
    return [record["mlm_loss"] for record in read_metrics(folder)][1:]


def test_loss_curves_lie_among_those_of_float32_weights(tmp_path: Path) -> None:
    plain = torch.tensor([losses(tmp_path / f"plain-{seed}", "float32", seed) for seed in range(3)])
    spread = (plain.max(0).values - plain.min(0).values).mean()
    assert plain[:, 0].min() - plain[:, -1].max() > 2 * spread  # there is something to learn
    for kind in KINDS:
        curve = torch.tensor(losses(tmp_path / kind, kind, 0))
        assert (curve - plain[0]).abs().mean() < spread, kind


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
    check_weight_precision(TrainConfig(), Ranks(0, 2, torch.device("cpu")))
