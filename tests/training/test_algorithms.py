"""Phases, frozen networks and schedules through the loop: what moves when, and that an interrupted run resumes exactly."""

from collections.abc import Mapping
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
    """Train for 12 steps, with a checkpoint every second step."""
    objective = build(options)
    every = {"log_every_steps": 1, "checkpoint_every_steps": 2, "keep_checkpoints": 9}
    train(context(folder, objective, **(every | train_options)), State())
    return objective


def weights(objective: ReplacedTokenDetection) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in checkpoint.model_tensors(objective).items()}


def saved(folder: Path, step: int) -> checkpoint.Contents:
    return checkpoint.load(folder / "checkpoints" / f"step-{step:08d}")


def moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    """The modules whose weights changed."""
    return {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}


def start_discriminator(options: dict[str, Any]) -> ReplacedTokenDetection:
    """The objective when its second phase, that of the discriminator, begins."""
    objective = build_option(options)
    with torch.no_grad():
        objective.generator.embeddings.norm.weight.add_(1.0)
    start = objective.phases(12)[1].start
    assert start is not None
    start()
    return objective


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
def test_an_interrupted_run_resumes_bit_for_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = weights(run(tmp_path, options))
    for step in (4, 6, 8):
        contents, objective = saved(tmp_path, step), build(options)
        checkpoint.load_model_tensors(objective, contents.model, "here")
        objective.load_carry_state(contents.carry)
        counters = {key: contents.state[key] for key in ("step", "tokens", "seconds", "updates")}
        train(context(tmp_path / str(step), objective), State(**counters, optimizer=dict(contents.optimizer)))
        assert not moved(whole, weights(objective)), step


@pytest.mark.parametrize("tying", ["none", "token", "embeddings", "gradient-disentangled"])
def test_two_stages(tmp_path: Path, tying: str) -> None:
    options = {**TWO_STAGE, "tying": tying}
    objective = run(tmp_path, options)
    begin, middle, end = weights(build(options)), saved(tmp_path, 6).model, weights(objective)
    # The shared tables of 'gradient-disentangled' stand under the discriminator's name, being the generator's.
    shared = {"discriminator"} if tying == "gradient-disentangled" else set()
    assert moved(begin, middle) == {"generator", "generator_head"} | shared
    assert moved(middle, end) == {"discriminator", "discriminator_head"}
    generator = {id(parameter) for parameter in objective.networks()["generator"].trained()}
    assert all(torch.equal(middle[name], end[name]) for name, p in objective.named_parameters() if id(p) in generator)
    records = read_metrics(tmp_path)
    assert ["discriminator_loss" in record for record in records] == [False] * 6 + [True] * 6
    assert records[7]["loss"] == pytest.approx(50 * records[7]["discriminator_loss"])


@pytest.mark.parametrize("tying", ["none", "embeddings", "gradient-disentangled"])
def test_the_discriminator_begins_as_a_copy(tying: str) -> None:
    objective = start_discriminator({**TWO_STAGE, "tying": tying})
    networks, ids = objective.networks(), torch.randint(5, 50, (2, 9))
    generator, discriminator = (networks[name].encoder(ids) for name in ("generator", "discriminator"))
    torch.testing.assert_close(discriminator, generator, rtol=0, atol=0)


@pytest.mark.parametrize(("tying", "same"), [("none", []), ("token", ["word"]), ("embeddings", ["word", "position", "norm"])])
def test_without_a_copy_of_the_weights_only_what_is_tied_is_taken_over(tying: str, same: list[str]) -> None:
    objective = start_discriminator({"algorithm": "two-stage", "copy_weights": False, "tying": tying})
    ours, theirs = (dict(encoder.embeddings.named_parameters()) for encoder in (objective.discriminator, objective.generator))
    assert {name.split(".")[0] for name in ours if torch.equal(ours[name], theirs[name])} >= set(same)
    assert {"word", "position", "norm"} - set(same) <= moved(ours, theirs)


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
def test_a_frozen_network_stays_as_it_is_and_the_other_keeps_its_optimizer(
    tmp_path: Path, options: dict[str, Any], still: set[str]
) -> None:
    end = weights(run(tmp_path, options))
    others = {name.split(".")[0] for name in end} - still
    assert moved(end, saved(tmp_path, 6).model) == others
    last = saved(tmp_path, 12)
    assert last.state["updates"] == 12
    assert {name.split(".")[0] for name in last.optimizer} == others


def test_a_frozen_generator_stays_so_under_shared_tables_without_gradient(tmp_path: Path) -> None:
    options = {"freeze_generator_at": 0, "tying": "gradient-disentangled"}
    before, objective = weights(build(options)), run(tmp_path, options)
    frozen = {id(parameter) for parameter in objective.networks()["generator"].trained()}
    for name, parameter in objective.named_parameters():
        assert torch.equal(parameter, before[name]) == (id(parameter) in frozen), name


def test_weights_follow_their_schedules(tmp_path: Path) -> None:
    options = {"discriminator_weight_schedule": ((0, 0.0), (10, 1.0)), "generator_weight_schedule": ((5, 1.0), (6, 0.0))}
    run(tmp_path, options)
    for record in read_metrics(tmp_path):
        step = record["step"] - 1
        expected = (step <= 5) * record["generator_loss"] + 50 * min(step / 10, 1) * record["discriminator_loss"]
        assert record["loss"] == pytest.approx(expected, rel=1e-5)


def test_an_adversarial_run_logs_its_entropy_and_held_out_metrics(tmp_path: Path) -> None:
    run(tmp_path, {"algorithm": "adversarial"}, evaluate_every_steps=6)
    records = read_metrics(tmp_path)
    assert all(0 < record["generator_entropy"] < 4 for record in records)
    last = records[-1]
    total = last["adversarial_loss"] + last["baseline_loss"] + 50 * last["discriminator_loss"]
    assert last["loss"] == pytest.approx(total, rel=1e-5)
    assert last["heldout_loss"] == pytest.approx(last["heldout_generator_loss"] + 50 * last["heldout_discriminator_loss"])
    assert not {"loss", "adversarial_loss", "baseline_loss", "generator_entropy", "flops"} & set(held_out_metrics(last))


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
