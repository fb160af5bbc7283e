"""What every objective must hold, of replaced token detection with each of its options; and which don't go together."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from discern.objectives.base import Objective
from discern.objectives.rtd import RTDConfig
from discern.objectives.rtd import RTDConfig as Config
from tests.objectives import test_conformance as conformance
from tests.objectives.rtd_options import OPTIONS, build_option

CHECKS: list[Callable[[str], None]] = [
    conformance.test_special_and_padding_tokens_are_never_chosen,
    conformance.test_the_batch_stays_as_it_was,
    conformance.test_the_same_randomness_gives_the_same_result,
    conformance.test_counts_are_those_of_the_terms,
    conformance.test_the_initial_loss_is_that_of_even_predictions,
    conformance.test_every_parameter_gets_a_gradient,
    conformance.test_micro_batches_add_up_to_the_whole,
    conformance.test_initialization_is_a_function_of_the_seed,
    conformance.test_evaluation_does_not_depend_on_the_batch_size,
    conformance.test_phases_cover_the_run,
]


@pytest.fixture(autouse=True)
def _built_by_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(name: str, **rest: Any) -> Objective:
        return build_option(OPTIONS[name], **rest)

    monkeypatch.setattr(conformance, "build", build)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("test_"))
def test_what_every_objective_must_hold(check: Callable[[str], None], name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_text_of_one_token_and_an_empty_one_stay_finite(name: str) -> None:
    conformance.test_sequences_with_nothing_to_corrupt_stay_finite(name, [[2, 9, 3], [2, 3], []])


@pytest.mark.parametrize("name", OPTIONS)
def test_each_parameter_moves_with_some_network(name: str) -> None:
    objective = build_option(OPTIONS[name])
    networks = objective.networks()
    assert next(iter(networks)) == "discriminator"
    moved = {parameter for network in networks.values() for parameter in network.trained()}
    assert moved == set(objective.parameters())


def test_the_defaults_have_the_parameters_that_they_always_had() -> None:
    names = {name.split(".")[0] for name, _ in build_option({}).named_parameters()}
    assert names == {"discriminator", "discriminator_head", "generator", "generator_head"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"generator": "two-tower", "tying": "all"}, ["two-tower", "set tying = 'embeddings'"]),
        ({"generator": "two-tower", "algorithm": "two-stage", "generator_size": 1.0}, ["two-tower", "copy_weights = false"]),
        ({"tying": "all"}, ["one encoder", "generator_size is 0.25", "set generator_size = 1.0"]),
        ({"tying": "all", "generator_size": 1.0, "generator_depth": 0.5}, ["generator_depth 0.5"]),
        ({"tying": "all", "generator_size": 1.0, "algorithm": "two-stage"}, ["one encoder", "tying = 'embeddings'"]),
        ({"algorithm": "two-stage"}, ["same sizes", "generator_size is 0.25", "copy_weights = false"]),
        ({"algorithm": "two-stage", "copy_weights": False, "freeze_generator_at": 5}, ["two_stage_steps", "leave out"]),
        ({"generator": "uniform", "tying": "gradient-disentangled"}, ["uniform", "no weights", "tying = 'embeddings'"]),
        ({"generator": "unigram", "algorithm": "adversarial"}, ["unigram", "no weights", "algorithm = 'joint'"]),
        ({"generator": "uniform", "generator_checkpoint": "run"}, ["no weights", "generator_checkpoint"]),
        ({"generator": "uniform", "freeze_generator_at": 3}, ["no weights", "freeze_generator_at"]),
        ({"generator": "uniform", "top_p": 0.9}, ["equal probability", "leave out top_p", "generator = 'unigram'"]),
        (
            {"generator": "unigram", "tying": "none", "freeze_discriminator_at": 2},
            ["nothing is trained", "leave out freeze_discriminator_at"],
        ),
        ({"freeze_generator_at": 3}, ["still trains", "gradient-disentangled"]),
        ({"freeze_discriminator_at": 3, "tying": "gradient-disentangled"}, ["still trains", "tying = 'none'"]),
        ({"freeze_discriminator_at": 3, "freeze_generator_at": 9, "tying": "none"}, ["nothing is trained", "max_steps"]),
        ({"algorithm": "adversarial", "masking": "with-replacement"}, ["probability of each sample", "masking = 'uniform'"]),
        ({"algorithm": "adversarial", "sentence_contrastive_weight": 1.0}, ["stay clean", "algorithm = 'joint'"]),
        ({"generator": "unigramm"}, ["unknown generator", "'unigram'"]),
        ({"algorithm": "adversary"}, ["unknown algorithm", "'adversarial'"]),
        ({"generator_weight_schedule": [[5, 1.0], [5, 0.0]]}, ["generator_weight_schedule", "larger than the one before"]),
    ],
)
def test_options_that_do_not_go_together_are_refused_with_what_to_set(options: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ValueError, match=says[0]) as caught:
        RTDConfig(**options)
    assert all(words in str(caught.value) for words in says)


def test_the_settings_survive_being_written_as_text() -> None:
    config = Config(discriminator_weight_schedule=((0, 0.0), (10, 1.0)), freeze_generator_at=4, tying="none")
    assert Config(**json.loads(config.model_dump_json())) == config


PROGRAM = """
import json
from tests.objectives.compiled import figures
from tests.objectives.rtd_options import OPTIONS, build_option

found = {}
for name in ("tying gradient-disentangled", "two towers, gradient-disentangled", "tying all", "algorithm adversarial"):
    objective = build_option(OPTIONS[name], num_layers=1, initializer_range=0.2)
    eager = figures(objective)
    for network in objective.networks().values():
        network.encoder.compile(backend="aot_eager")
    found[name] = [eager, figures(objective)]
print(json.dumps(found))
"""


def test_compiled_networks_give_the_same_losses_and_gradients() -> None:
    # In a program of its own: the shape checks that tests run under are not for the compiler to trace.
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=root, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    for eager, compiled in json.loads(done.stdout).values():
        assert compiled == pytest.approx(eager, rel=1e-4, abs=1e-6)


def test_frozen_tables_get_no_gradient_from_the_discriminator() -> None:
    objective = build_option(OPTIONS["tying gradient-disentangled"])
    tokens = conformance.batch()
    output = conformance.run(objective, tokens)
    output.terms["discriminator"].total.backward()
    shared = list(objective.networks()["generator"].encoder.embeddings.parameters())
    assert all(parameter.grad is None for parameter in shared)
    assert any(parameter.grad is not None for parameter in objective.discriminator.embeddings.parameters())


def test_with_everything_tied_there_is_one_encoder() -> None:
    objective = build_option(OPTIONS["tying all"])
    networks = objective.networks()
    assert networks["discriminator"].encoder is networks["generator"].encoder
    before = [parameter.clone() for parameter in networks["generator"].encoder.parameters()]
    with torch.no_grad():
        for parameter in networks["discriminator"].encoder.parameters():
            parameter.add_(1.0)
    assert all(not torch.equal(old, new) for old, new in zip(before, networks["generator"].encoder.parameters(), strict=True))
