"""Phases, frozen networks and schedules through the loop: what moves when, and that an interrupted run resumes exactly."""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from discern.objectives.rtd import ReplacedTokenDetection
from discern.training import checkpoint
from discern.training.loop import train
from discern.training.metrics import add_held_out, held_out_metrics, read_metrics
from discern.training.state import State
from tests.objectives.rtd_options import build_option
from tests.training.test_loop import context

TWO_STAGE = {"algorithm": "two-stage", "generator_size": 1.0}
# Eight steps; what changes does so at step 4.
RUNS: dict[str, dict[str, Any]] = {
    "two-stage": {**TWO_STAGE, "tying": "gradient-disentangled"},
    "two-stage, without a copy": {"algorithm": "two-stage", "copy_weights": False, "tying": "token"},
    "adversarial": {"algorithm": "adversarial"},
    "frozen generator": {"freeze_generator_at": 4, "tying": "gradient-disentangled"},
    "warm-up": {"generator_warmup_steps": 4},
    "entropy": {"masking": "entropy", "entropy_exponent": 2.0},
    "unigram, contrastive": {"generator": "unigram", "sentence_contrastive_weight": 1.0},
}


def build(name: str) -> ReplacedTokenDetection:
    return build_option(RUNS[name], dropout=0.1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of each run."""

    @cache
    def run(name: str) -> Path:
        folder = tmp_path_factory.mktemp("run")
        every = {"log_every_steps": 1, "checkpoint_every_steps": 2, "keep_checkpoints": 9, "evaluate_every_steps": 4}
        train(context(folder, build(name), max_steps=8, **every), State())
        return folder

    return run


def saved(folder: Path, step: int) -> checkpoint.Contents:
    return checkpoint.load(folder / "checkpoints" / f"step-{step:08d}")


def moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    """The weights that changed."""
    return {name for name in before if not torch.equal(before[name], after[name])}


def modules(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("step", [4, 6])
@pytest.mark.parametrize("name", RUNS)
def test_an_interrupted_run_resumes_bit_for_bit(tmp_path: Path, trained: Callable[[str], Path], name: str, step: int) -> None:
    contents, objective = saved(trained(name), step), build(name)
    checkpoint.load_model_tensors(objective, contents.model, "here")
    objective.load_carry_state(contents.carry)
    train(context(tmp_path, objective, max_steps=8), State.from_checkpoint(contents))
    assert not moved(saved(trained(name), 8).model, checkpoint.model_tensors(objective))


@pytest.mark.parametrize("name", ["two-stage", "two-stage, without a copy"])
def test_two_stages(trained: Callable[[str], Path], name: str) -> None:
    folder, objective = trained(name), build(name)
    middle, end = saved(folder, 4).model, saved(folder, 8).model
    # The shared tables of 'gradient-disentangled' stand under the discriminator's name, being the generator's.
    shared = {"discriminator"} if name == "two-stage" else set()
    assert modules(moved(checkpoint.model_tensors(objective), middle)) == {"generator", "generator_head"} | shared
    assert modules(moved(middle, end)) == {"discriminator", "discriminator_head"}
    generator = {id(parameter) for parameter in objective.networks()["generator"].trained()}
    assert not moved(middle, end) & {name for name, p in objective.named_parameters() if id(p) in generator}
    records = read_metrics(folder)
    assert ["discriminator_loss" in record for record in records] == [False] * 4 + [True] * 4
    assert records[5]["loss"] == pytest.approx(50 * records[5]["discriminator_loss"])


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({**TWO_STAGE, "tying": "none"}, "whole"),
        ({**TWO_STAGE, "tying": "embeddings"}, "whole"),
        ({**TWO_STAGE, "tying": "gradient-disentangled"}, "whole"),
        ({"algorithm": "two-stage", "copy_weights": False, "tying": "none"}, ""),
        ({"algorithm": "two-stage", "copy_weights": False, "tying": "token"}, "word"),
        ({"algorithm": "two-stage", "copy_weights": False, "tying": "embeddings"}, "word position norm"),
    ],
)
def test_the_discriminator_begins_as_a_copy_or_with_what_is_tied(options: dict[str, Any], same: str) -> None:
    objective = build_option(options)
    with torch.no_grad():
        objective.generator.embeddings.norm.weight.add_(1.0)
    start = objective.phases(12)[1].start
    assert start is not None
    start()
    networks, ids = objective.networks(), torch.randint(5, 50, (2, 9))
    generator, discriminator = networks["generator"].encoder, networks["discriminator"].encoder
    if same == "whole":
        torch.testing.assert_close(discriminator(ids), generator(ids), rtol=0, atol=0)
    else:
        ours, theirs = (dict(encoder.embeddings.named_parameters()) for encoder in (discriminator, generator))
        assert {"word", "position", "norm"} - modules(moved(ours, theirs)) == set(same.split())


def test_the_stages_of_a_run() -> None:
    for share, stages in ((0.5, [6, 6]), (5, [5, 7]), (20, [12])):
        assert [phase.steps for phase in build_option({**TWO_STAGE, "two_stage_steps": share}).phases(12)] == stages


def test_a_frozen_generator_stays_as_it_is_and_the_discriminator_keeps_its_optimizer(trained: Callable[[str], Path]) -> None:
    name, network = "frozen generator", "generator"
    objective, middle, end = build(name), saved(trained(name), 4), saved(trained(name), 8)
    frozen = {id(parameter) for parameter in objective.networks()[network].trained()}
    others = {name for name, parameter in objective.named_parameters() if id(parameter) not in frozen}
    assert moved(middle.model, end.model) == others
    assert end.state["updates"] == 8
    assert {name.rpartition(".")[0] for name in end.optimizer} == others


def test_an_adversarial_run_logs_its_entropy_and_held_out_metrics(trained: Callable[[str], Path]) -> None:
    records = read_metrics(trained("adversarial"))
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
