"""Phases, frozen networks and schedules through the loop: what moves when, and that a cut run goes on exactly."""

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from discern.errors import ConfigError
from discern.objectives.rtd import ReplacedTokenDetection
from discern.training import checkpoint, loop
from discern.training.loop import train
from discern.training.metrics_log import add_held_out, held_out_metrics, read_metrics
from discern.training.schedule import learning_rate
from discern.training.state import State
from tests.objectives.rtd_options import build_option
from tests.training.test_loop import context

TWO_STAGE = {"algorithm": "two-stage", "generator_size": 1.0}


def build(options: dict[str, Any]) -> ReplacedTokenDetection:
    return build_option(options, dropout=0.1)


def run(folder: Path, options: dict[str, Any], **train_options: Any) -> ReplacedTokenDetection:
    objective = build(options)
    train(context(folder, objective, **({"log_every_steps": 1} | train_options)), State())
    return objective


def weights(objective: ReplacedTokenDetection) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in checkpoint.model_tensors(objective).items()}


def go_on(folder: Path, options: dict[str, Any], step: int, **train_options: Any) -> ReplacedTokenDetection:
    contents = checkpoint.load(folder / "checkpoints" / f"step-{step:08d}")
    objective = build(options)
    checkpoint.load_model_tensors(objective, contents.model, "here")
    objective.load_carry_state(contents.carry)
    kept = {key: contents.state[key] for key in ("step", "tokens", "seconds", "updates")}
    train(context(folder / "on", objective, **train_options), State(**kept, optimizer=dict(contents.optimizer)))
    return objective


@pytest.mark.parametrize("cut", [4, 6, 8])
@pytest.mark.parametrize(
    "options",
    [
        TWO_STAGE,
        {"algorithm": "two-stage", "copy_weights": False, "tying": "token"},
        {**TWO_STAGE, "tying": "gradient-disentangled"},
        {"algorithm": "adversarial"},
        {"freeze_generator_at": 6, "tying": "gradient-disentangled"},
        {"freeze_discriminator_at": 6, "tying": "none"},
        {"generator_warmup_steps": 6},
        {"discriminator_weight_schedule": ((2, 0.0), (9, 1.0))},
        {"generator": "unigram", "sentence_contrastive_weight": 1.0},
    ],
)
def test_a_cut_run_goes_on_bit_for_bit(tmp_path: Path, options: dict[str, Any], cut: int) -> None:
    every = {"checkpoint_every_steps": cut, "keep_checkpoints": 9}
    whole = weights(run(tmp_path / "whole", options, **every))
    resumed = weights(go_on(tmp_path / "whole", options, cut, **every))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("tying", ["none", "token", "embeddings", "gradient-disentangled"])
def test_two_stages(tmp_path: Path, tying: str) -> None:
    options = {**TWO_STAGE, "tying": tying}
    objective = run(tmp_path, options, checkpoint_every_steps=6, keep_checkpoints=9)
    begin = weights(build(options))
    middle = dict(checkpoint.load(tmp_path / "checkpoints" / "step-00000006").model)
    end = weights(objective)

    def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
        return {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}

    # The shared tables of 'gradient-disentangled' stand under the discriminator's name, being the generator's.
    reads = tying == "gradient-disentangled"
    assert moved(begin, middle) == {"generator", "generator_head"} | ({"discriminator"} if reads else set())
    assert moved(middle, end) == {"discriminator", "discriminator_head"}
    generator = {id(parameter) for parameter in objective.networks()["generator"].trained()}
    for name, parameter in objective.named_parameters():
        if id(parameter) in generator:
            assert torch.equal(middle[name], end[name]), name
    records = read_metrics(tmp_path)
    assert ["discriminator_loss" in record for record in records] == [False] * 6 + [True] * 6
    assert records[7]["loss"] == pytest.approx(50 * records[7]["discriminator_loss"])


@pytest.mark.parametrize("tying", ["none", "embeddings", "gradient-disentangled"])
def test_the_discriminator_begins_as_a_copy(tying: str) -> None:
    objective = build_option({**TWO_STAGE, "tying": tying})
    start = objective.phases(12)[1].start
    assert start is not None
    start()
    networks, ids = objective.networks(), torch.randint(5, 50, (2, 9))
    expected, found = (networks[name].encoder(ids) for name in ("generator", "discriminator"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("tying", "same"), [("none", []), ("token", ["word"]), ("embeddings", ["word", "position", "norm"])])
def test_without_a_copy_of_the_weights_only_what_is_tied_is_taken_over(tying: str, same: list[str]) -> None:
    objective = build_option({"algorithm": "two-stage", "copy_weights": False, "tying": tying})
    with torch.no_grad():
        objective.generator.embeddings.norm.weight.add_(1.0)
    start = objective.phases(12)[1].start
    assert start is not None
    start()
    ours, theirs = objective.discriminator.embeddings, objective.generator.embeddings
    found = [
        name for name in ("word", "position", "norm") if torch.equal(getattr(ours, name).weight, getattr(theirs, name).weight)
    ]
    assert found == same


def test_the_switch_stays_where_it_was_when_a_run_is_extended() -> None:
    objective = build_option(TWO_STAGE)
    assert [phase.steps for phase in objective.phases(12)] == [6, 6]
    later = build_option(TWO_STAGE)
    later.load_carry_state(objective.carry_state())
    assert [phase.steps for phase in later.phases(20)] == [6, 14]
    assert [phase.steps for phase in later.phases(6)] == [6]
    assert [phase.steps for phase in build_option({**TWO_STAGE, "two_stage_steps": 5}).phases(12)] == [5, 7]


@pytest.mark.parametrize(("steps", "max_steps"), [(12, 12), (100, 12), (0.01, 12)])
def test_a_stage_without_steps_is_refused(steps: float, max_steps: int) -> None:
    with pytest.raises(ConfigError, match=r"two_stage_steps") as caught:
        build_option({**TWO_STAGE, "two_stage_steps": steps}).phases(max_steps)
    assert "fraction like 0.5" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("options", "still"),
    [
        ({"freeze_generator_at": 6, "tying": "none"}, {"generator", "generator_head"}),
        ({"freeze_discriminator_at": 6, "tying": "none"}, {"discriminator", "discriminator_head"}),
        (
            {"freeze_generator_at": 6, "tying": "none", "algorithm": "adversarial"},
            {"generator", "generator_head", "generator_baseline"},
        ),
    ],
)
def test_a_frozen_network_stays_as_it_is(tmp_path: Path, options: dict[str, Any], still: set[str]) -> None:
    end = weights(run(tmp_path, options, checkpoint_every_steps=6, keep_checkpoints=9))
    middle = checkpoint.load(tmp_path / "checkpoints" / "step-00000006").model
    moved = {name.split(".")[0] for name in end if not torch.equal(end[name], middle[name])}
    everything = {name.split(".")[0] for name in end}
    assert moved == everything - still


def test_a_frozen_generator_stays_so_under_shared_tables_without_gradient(tmp_path: Path) -> None:
    options = {"freeze_generator_at": 0, "tying": "gradient-disentangled"}
    before = weights(build(options))
    objective = run(tmp_path, options)
    frozen = {id(parameter) for parameter in objective.networks()["generator"].trained()}
    for name, parameter in objective.named_parameters():
        assert torch.equal(parameter, before[name]) == (id(parameter) in frozen), name


def test_freezing_lets_the_other_optimizer_go_on(tmp_path: Path) -> None:
    # The untied discriminator does not depend on the generator's weights moving: only its samples do, and they are uniform.
    options = {"tying": "none", "freeze_generator_at": 6}
    run(tmp_path, options, checkpoint_every_steps=6, keep_checkpoints=9)
    contents = checkpoint.load(tmp_path / "checkpoints" / "step-00000012")
    assert contents.state["updates"] == 12
    assert {name.split(".")[0] for name in contents.optimizer} == {"discriminator", "discriminator_head"}


def test_weights_follow_their_schedules(tmp_path: Path) -> None:
    options = {"discriminator_weight_schedule": ((0, 0.0), (10, 1.0)), "generator_weight_schedule": ((5, 1.0), (6, 0.0))}
    run(tmp_path, options)
    for record in read_metrics(tmp_path):
        step = record["step"] - 1
        expected = (step <= 5) * record["generator_loss"] + 50 * min(step / 10, 1) * record["discriminator_loss"]
        assert record["loss"] == pytest.approx(expected, rel=1e-5)


def test_the_adversarial_run_logs_its_entropy_and_held_out_figures(tmp_path: Path) -> None:
    run(tmp_path, {"algorithm": "adversarial"}, evaluate_every_steps=6)
    records = read_metrics(tmp_path)
    assert all(0 < record["generator_entropy"] < 4 for record in records)
    assert records[-1]["loss"] == pytest.approx(
        records[-1]["adversarial_loss"] + records[-1]["baseline_loss"] + 50 * records[-1]["discriminator_loss"], rel=1e-5
    )
    assert records[-1]["heldout_loss"] == pytest.approx(
        records[-1]["heldout_generator_loss"] + 50 * records[-1]["heldout_discriminator_loss"]
    )
    assert not {"loss", "adversarial_loss", "baseline_loss", "generator_entropy", "flops"} & set(held_out_metrics(records[-1]))


def test_a_held_out_loss_has_one_name_whatever_this_step_trained() -> None:
    evaluated = {"loss": 3.0, "discriminator_loss": 0.5, "discriminator_auc": 0.7}
    alone = add_held_out({"step": 1, "loss": 2.0, "generator_loss": 2.0}, evaluated)
    both = add_held_out({"step": 9, "loss": 2.0, "discriminator_loss": 0.6}, evaluated)
    held = {"heldout_loss": 3.0, "heldout_discriminator_loss": 0.5, "discriminator_auc": 0.7}
    assert held_out_metrics(alone) == held_out_metrics(both) == held
    assert held_out_metrics({"step": 2, "loss": 1.0, "generator_accuracy": 0.1}) == {}


@pytest.mark.parametrize("options", [TWO_STAGE, {"freeze_generator_at": 6, "tying": "none"}, {"generator_warmup_steps": 6}])
def test_phases_know_where_they_begin(options: dict[str, Any]) -> None:
    phases = build(options).phases(12)
    assert [phase.begins for phase in phases] == [0, *accumulate(phase.steps for phase in phases)][:-1]
    assert len(phases) == 2


def test_a_phase_with_its_own_schedule_has_its_own_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a time budget, the second phase warms up as a run of its own does."""
    seen: list[float | None] = []

    def noted(settings: Any, step: int, steps: int, used: float | None = None) -> float:
        seen.append(used)
        return learning_rate(settings, step, steps, used)

    monkeypatch.setattr(loop, "learning_rate", noted)
    run(tmp_path, {"generator_warmup_steps": 6}, max_hours=1.0)
    first, second = seen[:6], seen[6:]
    assert all(used is not None and used >= 0 for used in seen)
    assert first == sorted(first)  # type: ignore[type-var]
    assert second == sorted(second)  # type: ignore[type-var]
    assert second[0] == 0
