"""What every registered objective must hold, and `rtd` with each option. A new objective is tested by being registered."""

import json
import math
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from discern.corruption.randomness import Randomness
from discern.models.config import ModelConfig
from discern.objectives import objectives
from discern.objectives.base import Objective
from discern.types import StepOutput, TokenBatch
from tests.objectives.rtd_options import OPTIONS, build_option
from tests.support import MODELS, SPECIAL, make_batch, settings

NAMES = objectives.names()
# Each kind of encoder and of embeddings
CONFIGS: dict[str, dict[str, Any]] = {
    "hybrid": {
        "causal_fraction": 0.4,  # of a few rows, some
        "mask_probability": 0.15,
        "mask_probability_end": None,
        "mask_probability_steps": None,
    }
}
COMPILED = ["electric", "permutation-lm", "rtd", "two towers, gradient-disentangled"]
of_objectives = pytest.mark.parametrize("name", NAMES)
of_objectives_and_options = pytest.mark.parametrize("name", [*NAMES, *OPTIONS])


def build(name: str, *, dropout: float = 0.0, seed: int = 0, vocab_size: int = 50, **sizes: Any) -> Objective:
    """The objective of this name, or replaced token detection with the option of this name, its weights filled."""
    if name in OPTIONS:
        return build_option(OPTIONS[name], dropout=dropout, seed=seed, vocab_size=vocab_size, **sizes)
    factory = objectives.load(name)
    model = {"hidden_dropout": dropout, "attention_dropout": dropout, **sizes, **MODELS.get(name, {})}
    objective: Objective = factory(factory.Config(**CONFIGS.get(name, {})), settings(vocab_size, **model))
    objective.initialize(seed)
    return objective


def batch(rows: int = 6, seed: int = 0) -> TokenBatch:
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (rows,), generator=rng).tolist()
    made = make_batch([[SPECIAL.cls, *torch.randint(5, 50, (n,), generator=rng).tolist(), SPECIAL.sep] for n in lengths])
    return replace(made, token_type_ids=(made.position_ids > 9).long())


def randomness(tokens: TokenBatch, step: int = 0) -> Randomness:
    return Randomness(0, step, tokens.slot)


def run(objective: Objective, tokens: TokenBatch, step: int = 0) -> StepOutput:
    numbers = randomness(tokens, step)
    output: StepOutput = objective(objective.corrupt(tokens, numbers), numbers)
    return output


def mean_loss(output: StepOutput) -> torch.Tensor:
    return torch.stack([term.weight * term.total / max(term.count, 1) for term in output.terms.values()]).sum()


@of_objectives_and_options
def test_special_and_padding_tokens_are_never_chosen(name: str) -> None:
    objective, tokens = build(name), batch()
    for step in range(20):
        corrupted = objective.corrupt(tokens, randomness(tokens, step))
        chosen = corrupted.masked_positions
        if corrupted.is_causal is not None:
            assert corrupted.is_causal.tolist() == [False, False, True, False, True, False]
            chosen = chosen | corrupted.mask("next")
        assert chosen.any(1).all()
        assert not (chosen & (tokens.special_tokens_mask | ~tokens.attention_mask)).any()


@of_objectives_and_options
def test_the_batch_is_not_modified_and_counts_are_those_of_the_terms(name: str) -> None:
    objective, tokens = build(name), batch()
    before = {item.name: getattr(tokens, item.name) for item in fields(tokens)}
    copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in before.items()}
    corrupted = objective.corrupt(tokens, randomness(tokens))
    output = objective(corrupted, randomness(tokens))
    for key, value in copies.items():
        assert torch.equal(value, before[key]) if isinstance(value, torch.Tensor) else value == before[key]
    assert objective.counts(corrupted) == {key: term.count for key, term in {**output.terms, **output.metrics}.items()}


@of_objectives_and_options
def test_the_same_randomness_gives_the_same_result(name: str) -> None:
    objective, tokens = build(name), batch()
    first, second, other = (mean_loss(run(objective, tokens, step)) for step in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@of_objectives_and_options
def test_the_initial_loss_is_that_of_even_predictions(name: str) -> None:
    words, half, replaced = math.log(50), math.log(2), 0.15 * 49 / 50
    copied = replaced * math.log(2 * 50) + (1 - replaced) * math.log(2 * 50 / 51)  # half copied, half written
    even = {"generator": words, "causal_lm": words, "permutation_lm": words, "correction": copied, "adversarial": 0.0}
    even["mlm"] = copied if name == "all-tokens-mlm" else words
    if name == "electric":  # a word in 50, of which 15 in 100 are noise
        half = 0.15 * math.log1p(50 * 0.85 / 0.15) + 0.85 * math.log1p(0.15 / 0.85 / 50)
    for key, term in run(build(name, vocab_size=50), batch(64)).terms.items():
        assert term.total.item() / term.count == pytest.approx(even.get(key, half), rel=0.06, abs=0.03)


@of_objectives_and_options
def test_every_parameter_gets_a_gradient_and_is_trained_with_a_network(name: str) -> None:
    objective = build(name, dropout=0.1).train()
    mean_loss(run(objective, batch(16))).backward()
    for key, parameter in objective.named_parameters():
        assert parameter.grad is not None, key
        # A key's bias shifts all scores of a query alike, so its gradient is zero but for rounding.
        assert parameter.grad.any() or key.endswith("key.bias"), key
    networks = objective.networks().values()
    assert {parameter for network in networks for parameter in network.trained()} == set(objective.parameters())
    assert all(isinstance(network.encoder.config, ModelConfig) for network in networks)


@of_objectives_and_options
@pytest.mark.parametrize("rows", [[[]], [[9]], [[9], [], None]])
def test_sequences_with_nothing_to_corrupt_stay_finite(name: str, rows: list[list[int] | None]) -> None:
    objective = build(name, dropout=0.1).train()
    loss = mean_loss(run(objective, make_batch([[] if row is None else [SPECIAL.cls, *row, SPECIAL.sep] for row in rows])))
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in objective.parameters() if p.grad is not None)


@of_objectives_and_options
def test_micro_batches_add_up_to_the_whole(name: str) -> None:
    objective, tokens = build(name), batch(9)
    numbers = randomness(tokens)
    whole = run(objective, tokens)
    sums = dict.fromkeys(whole.terms, 0.0)
    for start, stop in ((0, 2), (2, 7), (7, 9)):
        part, rows = tokens.rows(start, stop), numbers.rows(start, stop)
        for key, term in objective(objective.corrupt(part, rows), rows).terms.items():
            sums[key] += term.total.item()
    assert sums == pytest.approx({key: term.total.item() for key, term in whole.terms.items()}, rel=1e-6)


@of_objectives_and_options
def test_initialization_is_a_function_of_the_seed(name: str) -> None:
    first, second, other = (dict(build(name, seed=seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@of_objectives_and_options
def test_evaluation_depends_neither_on_the_batch_size_nor_on_the_ranks(name: str) -> None:
    objective, tokens = build(name).eval(), batch(12)
    figures = []
    for size in (12, 5, 1):
        evaluators = [objective.evaluator(), objective.evaluator()]  # as of two ranks
        for start in range(0, 12, size):
            part, numbers = tokens.rows(start, start + size), randomness(tokens).rows(start, start + size)
            corrupted = objective.corrupt(part, numbers)
            with torch.no_grad():
                evaluators[start // size % 2].update(objective(corrupted, numbers), corrupted)
        evaluators[0].merge(evaluators[1])
        figures.append(evaluators[0].compute())
    for other in figures[1:]:
        assert other == pytest.approx(figures[0], rel=1e-5)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, list[float]]]:
    """Losses and gradient norms of each objective, eager and compiled."""
    program = [sys.executable, "-m", "tests.objectives.compiled", *COMPILED]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    figures: dict[str, dict[str, list[float]]] = json.loads(done.stdout)
    return figures


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_encoders_give_the_same_losses_and_gradients(compiled: dict[str, dict[str, list[float]]], name: str) -> None:
    assert compiled[name]["compiled"] == pytest.approx(compiled[name]["eager"], rel=1e-4, abs=1e-6)
    assert compiled[name]["graphs"][0] > 0, "nothing of it went through the compiler"


@of_objectives
def test_counts_are_exact(name: str) -> None:
    """Of 20 words a row, 3 are chosen: every term counts these, or the words, or all real tokens, or those of causal rows."""
    objective = build(name)
    tokens = make_batch([[SPECIAL.cls, *range(5, 25), SPECIAL.sep], [SPECIAL.cls, *range(25, 45), SPECIAL.sep]])
    corrupted = objective.corrupt(tokens, randomness(tokens))
    assert corrupted.masked_positions.sum(1).tolist() == [3, 3]
    assert (corrupted.num_masked, corrupted.num_tokens) == (6, 44)
    assert set(objective.counts(corrupted).values()) <= {0, 6, 40, 44}


@of_objectives
def test_the_loss_of_a_row_does_not_depend_on_its_padding(name: str) -> None:
    objective, tokens = build(name), batch(1)
    padded = make_batch([tokens.input_ids[0].tolist(), [SPECIAL.cls, *range(5, 45), SPECIAL.sep]]).rows(0, 1)
    for key, term in run(objective, tokens).terms.items():
        assert run(objective, padded).terms[key].total.item() == pytest.approx(term.total.item(), rel=1e-5)
