"""Arithmetic: the paper's printed totals, and what torch's own counter sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from discern import kernels
from discern.artifacts.run import build_objective
from discern.corruption.randomness import Randomness
from discern.data.batching.synthetic import SPECIAL, SyntheticParts, SyntheticRows
from discern.errors import ConfigError
from discern.models import encoders
from discern.models.base import build_embeddings, build_encoder
from discern.models.config import build_config
from discern.models.flops import module_flops
from discern.objectives import objectives
from discern.objectives.base import BuildSettings, Objective, Phase, Vocabulary
from discern.training.flops import MASKED_SHARE, Flops, PaperTransformer, RunFlops, executed_flops, run_flops, step_flops
from discern.training.pretrain_config import load_pretrain_config
from discern.training.schedule import step_sizes
from discern.types import SpecialTokens
from tests.support import MODELS, settings

BERT_VOCABULARY = 30_522


def transformer(
    hidden: int, layers: int, *, length: int = 512, vocabulary: int = BERT_VOCABULARY, **other: Any
) -> PaperTransformer:
    sizes = {"embedding_size": hidden, "feedforward_size": 4 * hidden, "num_heads": max(hidden // 64, 1)}
    return PaperTransformer(hidden, layers, length, vocabulary, **(sizes | other))


def language_model(model: PaperTransformer, sequences: float, share: float = MASKED_SHARE) -> float:
    return model.training(share * model.vocabulary_head, sequences)


@pytest.mark.parametrize(
    ("flops", "printed"),
    [
        pytest.param(language_model(transformer(768, 12, vocabulary=40_000), 128 * 960_800, 1.0), "3.9688e+19", id="gpt"),
        pytest.param(
            language_model(transformer(256, 12, length=128, embedding_size=128), 128 * 1.45e6), "1.4187e+18", id="bert small"
        ),
        pytest.param(language_model(transformer(768, 12), 256e6), "6.4283e+19", id="bert base"),
        pytest.param(language_model(transformer(1024, 24), 256e6), "1.9172e+20", id="bert large"),
        pytest.param(language_model(transformer(1024, 24, vocabulary=50_265), 8000 * 500_000), "3.1872e+21", id="roberta"),
        pytest.param(
            language_model(transformer(4096, 12, vocabulary=30_000, embedding_size=128), 4096 * 1.5e6), "3.1139e+22", id="albert"
        ),
    ],
)
def test_the_comparison_models_of_the_released_script(flops: float, printed: str) -> None:
    assert f"{flops:.4e}" == printed


@pytest.mark.parametrize(
    ("preset", "printed"),
    [
        ("electra-small", "1.2937e+18"),
        ("electra-base", "6.4245e+19"),
        ("electra-large", "7.1176e+20"),
        ("electra-large-1.75m", "3.1140e+21"),
        ("mlm-small", "1.4187e+18"),
        ("mlm-base", "6.4283e+19"),
    ],
)
def test_the_presets_cost_what_the_paper_prints(preset: str, printed: str) -> None:
    config = load_pretrain_config(None, preset).config
    with torch.device("meta"):
        objective = build_objective(config, Vocabulary(BERT_VOCABULARY, SpecialTokens(0, 100, 101, 102, 103)))
    total = run_flops(objective, config.train.max_steps, step_sizes(config.train, config.data)).total
    assert f"{total.paper:.4e}" == printed


def test_inference_of_the_paper() -> None:
    """Table 1: 3.7e9 for small, 2.9e10 for base, at 128 tokens, the discriminator's head included."""
    small, base = transformer(256, 12, length=128, embedding_size=128), transformer(768, 12, length=128)
    assert f"{(small.body + small.binary_head) * 128:.2e}" == "3.68e+09"
    assert f"{(base.body + base.binary_head) * 128:.2e}" == "2.86e+10"


def counted(objective: Objective, length: int, rows: int, source: SyntheticParts | None = None) -> int:
    """What torch counts in a step over full rows, forward and backward."""
    numbers = np.arange(rows)
    randomness = Randomness(0, 0, torch.arange(rows))
    batch = objective.corrupt((source or SyntheticRows(90, length, 1.0, rows, 0)).batch(numbers, numbers), randomness)
    objective.initialize(0)
    objective.train()
    counter = FlopCounterMode(display=False)
    with kernels.switched_off(), counter:
        output = objective(batch, randomness)
        torch.stack([term.total for term in output.terms.values()]).sum().backward()
    return int(counter.get_total_flops())


def small(name: str, *, checkpointing: bool = False, **options: Any) -> Objective:
    factory = objectives.load(name)
    given = settings(vocab_size=90, hidden_size=16, num_heads=2)
    # A sixth of 42 positions, 40 of which may be masked, is 7: no rounding.
    config = factory.Config(**({"name": name, "mask_probability": 7 / 40} | options))
    vocabulary = Vocabulary(90, SPECIAL, torch.ones(90, dtype=torch.int64))
    objective: Objective = factory(config, BuildSettings(given.model, vocabulary, checkpointing))
    return objective


@pytest.mark.parametrize("name", ["mlm", "rtd", "rtd-masked-only", "replace-mlm"])
def test_what_is_executed_is_what_torch_counts(name: str) -> None:
    objective, length, rows = small(name), 42, 3
    found = executed_flops(objective.forward_passes(Phase("train", 10)), length, rows)
    # Seven of forty, where the formula has 7/40 of 42: the only difference.
    heads = found - executed_flops(without_words(objective), length, rows)
    assert counted(objective, length, rows) == pytest.approx(found - heads * (1 - (7 / 42) / (7 / 40)), rel=1e-9)


def without_words(objective: Objective) -> list[ForwardPass]:
    """The passes without the heads over the vocabulary."""
    passes = objective.forward_passes(Phase("train", 10))
    return [replace(each, head_share=0.0) if each.head_share < 1 else each for each in passes]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("permutation-lm", {}),
        ("permutation-lm", {"memory_length": 10, "span_targets": False}),
        ("mlm", {"mask_probability": 0.2}),
    ],
    ids=["permutation-lm", "memory", "mlm"],
)
def test_what_an_xlnet_executes_is_what_torch_counts(name: str, options: dict[str, Any], checkpointing: bool) -> None:
    factory, length, rows, size = objectives.load(name), 42, 3, 16
    sizes = settings(**{"vocab_size": 90, "hidden_size": size, "num_heads": 2, **MODELS["permutation-lm"]})
    vocabulary = Vocabulary(90, SPECIAL, torch.ones(90, dtype=torch.int64))
    objective = factory(factory.Config(**options), BuildSettings(sizes.model, vocabulary, checkpointing))
    numbers, parts = np.arange(rows), SyntheticParts(SyntheticRows(90, length, 1.0, rows, 0))
    (each,) = objective.forward_passes(Phase("train", 10))
    batch = objective.corrupt(parts.batch(numbers, numbers), Randomness(0, 0, torch.arange(rows)))
    each = replace(each, head_share=batch.num_masked / (rows * length))
    found = executed_flops([each], length, rows)
    # The keys of the distances, of rows in either direction and once for all of a kind; nothing asks for the table's gradient.
    span = 2 * length + getattr(objective.config, "memory_length", 0)
    distances = sizes.model.num_layers * 2 * 2 * span * size**2
    assert counted(objective, length, rows, parts) == found + (3 if checkpointing else 2) * distances


def test_the_query_stream_costs_its_share() -> None:
    """One block of width 16: the query stream asks at a sixth of the positions, and nobody reads the content."""
    factory = objectives.load("permutation-lm")
    given = settings(**{"vocab_size": 90, "num_layers": 1, "feedforward_size": 32, **MODELS["permutation-lm"]})
    objective = factory(factory.Config(), given)
    passes = objective.forward_passes(Phase("train", 1))
    keys_and_values, asking = 2 * 2 * 16 * 16, 2 * 2 * 16 * 16 + 2 * 16 * (42 + 84 + 42) + 2 * 2 * 16 * 32
    expected = keys_and_values + (asking + 2 * 16 * 90) / 6
    assert executed_flops(passes, 42, 5) == pytest.approx(3 * 5 * 42 * expected)


def test_bilinear_head_and_recomputation_count() -> None:
    plain = small("rtd", tying="gradient-disentangled", discriminator_head="bilinear")
    again = small("rtd", checkpointing=True, tying="gradient-disentangled", discriminator_head="bilinear")
    passes = again.forward_passes(Phase("train", 10))
    found = executed_flops(passes, 42, 3)
    assert found > executed_flops(passes, 42, 3, recomputed=False)
    assert executed_flops(passes, 42, 3, recomputed=False) == executed_flops(plain.forward_passes(Phase("train", 10)), 42, 3)
    assert counted(again, 42, 3) - counted(plain, 42, 3) == pytest.approx(found - executed_flops(passes, 42, 3, recomputed=False))


def test_a_frozen_network_counts_forward_only() -> None:
    objective = small("rtd")
    both = step_flops(objective, Phase("train", 1), 42, 1)
    one = step_flops(objective, Phase("train", 1, frozenset({"discriminator"})), 42, 1)
    generator = step_flops(objective, Phase("train", 1, frozenset({"generator"})), 42, 1)
    assert one.executed < both.executed
    assert one.paper < both.paper
    assert generator.executed < both.executed


def test_two_towers_cost_twice_one() -> None:
    objective = small("electric", generator_size=0.5)
    (discriminator, first, second) = objective.forward_passes(Phase("train", 1))
    assert executed_flops([first], 42, 1) == 3 * executed_flops([second], 42, 1)
    # Two blocks of width 8, twice: projections, attention, feed-forward; the head reads 16 and writes 8, then the words.
    tower = 8 * 8 * 2 + 2 * (2 * (4 * 8 * 8 + 2 * 8 * 16) + 4 * 8 * 42)
    tower -= 8 * 8 * 2  # embeddings of 8 need no projection to 8
    assert executed_flops([second], 42, 1) / 42 == 2 * tower + 2 * (16 * 8 + 8 * 90)
    assert discriminator.trains


def test_a_run_of_two_phases() -> None:
    run = RunFlops([(10, Flops(2.0, 20.0)), (5, Flops(4.0, 40.0))])
    assert run.after(0) == Flops(0.0, 0.0)
    assert run.after(10) == Flops(20.0, 200.0)
    assert run.after(12) == Flops(28.0, 280.0)
    assert run.total == Flops(40.0, 400.0)
    assert run.after(16).executed == 44.0
    assert [run.steps_within(budget) for budget in (0.0, 1.9, 2.0, 20.0, 23.9, 24.0, 40.0, 44.0)] == [0, 0, 1, 10, 10, 11, 15, 16]


@pytest.mark.parametrize("name", ["rtd", "replace-mlm", "all-tokens-mlm"])
def test_a_rate_that_rises_is_counted_by_its_mean(name: str) -> None:
    factory = objectives.load(name)
    config = factory.Config(mask_probability=0.1, mask_probability_end=0.5, mask_probability_steps=100)
    objective = factory(config, settings())
    generator = objective.networks()["generator"]

    def share(phase: Phase) -> float:
        return next(each.head_share for each in objective.forward_passes(phase) if each.network == generator)

    assert share(Phase("train", 100)) == pytest.approx(0.3, abs=0.01)
    assert share(Phase("second half", 50, begins=50)) == pytest.approx(0.4, abs=0.01)
    assert share(Phase("afterwards", 50, begins=100)) == pytest.approx(0.5)


@pytest.mark.parametrize("name", encoders.names())
def test_every_encoder_counts_what_torch_counts(name: str) -> None:
    """Per token; what a batch computes once for all of its rows is left out, so two batches are compared."""
    sizes = {"num_layers": 2, "hidden_size": 16, "embedding_size": 16, "num_heads": 2, "feedforward_size": 24}
    config = build_config({"encoder": name, **sizes})
    encoder = build_encoder(build_embeddings(90, 16, config), config).eval()

    def counted(rows: int) -> int:
        counter = FlopCounterMode(display=False)
        with kernels.switched_off(), torch.no_grad(), counter:
            encoder(torch.randint(5, 90, (rows, 21)))
        return int(counter.get_total_flops())

    found = encoder.forward_flops(21)
    assert found > 0
    assert counted(5) - counted(2) == 3 * 21 * found


class Mystery(nn.Module):
    """A layer that nobody counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)


def test_a_module_whose_flops_are_unknown_is_an_error() -> None:
    assert module_flops(nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2, bias=False)), 7) == 2 * 15 + 2 * 10
    with pytest.raises(ConfigError, match=r"the FLOPs of .*Mystery are unknown"):
        module_flops(nn.ModuleList([nn.Linear(3, 3), Mystery()]), 7)
    objective = small("rtd")
    objective.get_submodule("discriminator.blocks").append(Mystery())
    with pytest.raises(ConfigError, match="Mystery"):
        step_flops(objective, Phase("train", 1), 42, 1)
