"""Arithmetic: the paper's printed totals, and what torch's own counter sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from discern import kernels
from discern.corruption.randomness import Randomness
from discern.data.batching.synthetic import SPECIAL, SyntheticRows
from discern.errors import ConfigError
from discern.model_files.run import build_objective
from discern.models import encoders
from discern.models.base import build_embeddings, build_encoder
from discern.models.config import build_config
from discern.models.layers import module_flops
from discern.objectives import objectives
from discern.objectives.base import BuildSettings, Objective, Phase, Vocabulary
from discern.training.config import load_pretrain_config, step_sizes
from discern.training.flops import (
    MASKED_SHARE,
    Flops,
    PaperTransformer,
    Product,
    RecordProducts,
    RunFlops,
    executed_flops,
    record_products,
    run_flops,
    shortest_time,
    step_flops,
)
from discern.types import CorruptedBatch, SpecialTokens
from tests.support import MODELS, settings

BERT_VOCABULARY = 30_522
LENGTH, ROWS = 42, 3
TRAIN = Phase("train", 100)


def transformer(hidden: int, layers: int, **sizes: Any) -> PaperTransformer:
    defaults = {"embedding_size": hidden, "feedforward_size": 4 * hidden, "num_heads": hidden // 64}
    return PaperTransformer(hidden, layers, **(defaults | sizes))


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


def counted(objective: Objective, step: Callable[[], None]) -> int:
    """What torch counts in a step, forward and backward."""
    objective.train()
    counter = FlopCounterMode(display=False)
    with kernels.switched_off(), counter:
        step()
    return int(counter.get_total_flops())


def small(name: str, *, checkpointing: bool = False, **options: Any) -> tuple[Objective, CorruptedBatch, Callable[[], None]]:
    """An objective, full rows for it, and a step over them."""
    factory = objectives.load(name)
    given = settings(**{"vocab_size": 90, "hidden_size": 16, "num_heads": 2, **MODELS.get(name, {})})
    vocabulary = Vocabulary(90, SPECIAL, torch.ones(90, dtype=torch.int64))
    objective: Objective = factory(factory.Config(**options), BuildSettings(given.model, vocabulary, checkpointing))
    objective.initialize(0)
    numbers, randomness = np.arange(ROWS), Randomness(0, 0, torch.arange(ROWS))
    source = SyntheticRows(90, LENGTH, 1.0, ROWS, 0, two_parts=name in MODELS)
    batch = objective.corrupt(source.batch(numbers, numbers), randomness)

    def step() -> None:
        output = objective(batch, randomness)
        torch.stack([term.total for term in output.terms.values()]).sum().backward()

    return objective, batch, step


@pytest.mark.parametrize(
    ("name", "options"),
    [("mlm", {}), ("rtd", {}), ("rtd", {"correction_weight": 1.0}), ("rtd-masked-only", {}), ("replace-mlm", {})],
)
def test_what_is_executed_is_what_torch_counts(name: str, options: dict[str, Any]) -> None:
    objective, batch, step = small(name, mask_probability=7 / 40, **options)
    share = batch.num_masked / (ROWS * LENGTH)
    passes = objective.forward_passes(TRAIN)
    passes = [replace(network, head_share=share) if network.head_share < 1 else network for network in passes]
    assert counted(objective, step) == executed_flops(passes, LENGTH, ROWS)


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
    options = {"tying": "gradient-disentangled", "discriminator_head": "bilinear"}
    plain, _, step = small("rtd", **options)
    checkpointed, _, again = small("rtd", checkpointing=True, **options)
    passes = checkpointed.forward_passes(TRAIN)
    once = executed_flops(passes, LENGTH, ROWS, recomputed=False)
    assert once == executed_flops(plain.forward_passes(TRAIN), LENGTH, ROWS)
    recomputed = executed_flops(passes, LENGTH, ROWS) - once
    assert counted(checkpointed, again) - counted(plain, step) == pytest.approx(recomputed)
    assert recomputed > 0


def test_a_frozen_network_counts_forward_only() -> None:
    objective = small("rtd")[0]
    both = step_flops(objective, TRAIN, LENGTH, 1)
    discriminator, generator = (
        step_flops(objective, Phase("train", 1, frozenset({name})), LENGTH, 1) for name in ("discriminator", "generator")
    )
    assert discriminator.executed < both.executed
    assert discriminator.paper < both.paper
    assert generator.executed < both.executed


def test_two_towers_cost_twice_one() -> None:
    objective = small("electric", generator_size=0.5)[0]
    (discriminator, first, second) = objective.forward_passes(TRAIN)
    assert executed_flops([first], 42, 1) == 3 * executed_flops([second], 42, 1)
    # Two blocks of width 8, twice: projections, attention, feed-forward; the head reads 16 and writes 8, then the words.
    # Embeddings of 8 need no projection to 8.
    tower = 2 * (2 * (4 * 8 * 8 + 2 * 8 * 16) + 4 * 8 * 42)
    assert executed_flops([second], 42, 1) / 42 == 2 * tower + 2 * (16 * 8 + 8 * 90)
    assert discriminator.trains


def test_a_run_of_two_phases() -> None:
    run = RunFlops([(10, Flops(2.0, 20.0)), (5, Flops(4.0, 40.0))])
    assert run.after(12) == Flops(28.0, 280.0)
    assert run.total == Flops(40.0, 400.0)
    assert run.after(16).executed == 44.0
    assert [run.steps_within(budget) for budget in (0.0, 1.9, 2.0, 23.9, 24.0, 44.0)] == [0, 0, 1, 10, 11, 16]


@pytest.mark.parametrize("name", ["rtd", "replace-mlm", "all-tokens-mlm"])
def test_a_rate_that_rises_is_counted_by_its_mean(name: str) -> None:
    objective = small(name, mask_probability=0.1, mask_probability_end=0.5, mask_probability_steps=100)[0]
    generator = objective.networks()["generator"]
    for phase, mean in ((TRAIN, 0.3), (Phase("second half", 50, begins=50), 0.4), (Phase("afterwards", 50, begins=100), 0.5)):
        (share,) = [network.head_share for network in objective.forward_passes(phase) if network.network == generator]
        assert share == pytest.approx(mean, abs=0.01)


@pytest.mark.parametrize("name", encoders.names())
def test_every_encoder_counts_what_torch_counts(name: str) -> None:
    """Per token; what a batch computes once for all of its rows is left out, so two batches are compared."""
    sizes = {"num_layers": 2, "hidden_size": 16, "embedding_size": 16, "num_heads": 2, "feedforward_size": 24}
    config = build_config({"encoder": name, **sizes})
    encoder = build_encoder(build_embeddings(90, 16, config), config).eval()
    totals = []
    for rows in (2, 5):
        counter = FlopCounterMode(display=False)
        with kernels.switched_off(), torch.no_grad(), counter:
            encoder(torch.randint(5, 90, (rows, 21)))
        totals.append(counter.get_total_flops())
    assert totals[1] - totals[0] == 3 * 21 * encoder.forward_flops(21) > 0


def test_a_module_whose_flops_are_unknown_is_an_error() -> None:
    class Mystery(nn.Module):
        pass

    assert module_flops(nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2, bias=False)), 7) == 2 * 15 + 2 * 10
    objective = small("rtd")[0]
    objective.get_submodule("discriminator.blocks").append(Mystery())
    with pytest.raises(ConfigError, match=r"the FLOPs of .*Mystery are unknown"):
        step_flops(objective, TRAIN, LENGTH, 1)


@pytest.mark.parametrize(
    ("options", "checkpointing"),
    [({}, False), ({}, True), ({"memory_length": 10, "span_targets": False}, False)],
)
def test_what_an_xlnet_executes_is_what_torch_counts(options: dict[str, Any], checkpointing: bool) -> None:
    objective, batch, step = small("permutation-lm", checkpointing=checkpointing, **options)
    (network,) = objective.forward_passes(TRAIN)
    executed = executed_flops([replace(network, head_share=batch.num_masked / (ROWS * LENGTH))], LENGTH, ROWS)
    # The keys of the distances, of rows in either direction and once for all of a kind; nothing asks for the table's gradient.
    span = 2 * LENGTH + options.get("memory_length", 0)
    distances = 2 * 2 * 2 * span * 16**2
    assert counted(objective, step) == executed + (3 if checkpointing else 2) * distances


@pytest.mark.parametrize(
    ("model", "sequences", "share", "printed"),
    [
        pytest.param(transformer(768, 12, sequence_length=512, vocab_size=40_000), 128 * 960_800, 1.0, "3.9688e+19", id="gpt"),
        pytest.param(
            transformer(4096, 12, sequence_length=512, vocab_size=30_000, embedding_size=128),
            4096 * 1.5e6,
            MASKED_SHARE,
            "3.1139e+22",
            id="albert",
        ),
    ],
)
def test_the_comparison_models_of_the_released_script(
    model: PaperTransformer, sequences: float, share: float, printed: str
) -> None:
    assert f"{2 * (model.body + share * model.vocabulary_head) * model.sequence_length * sequences:.4e}" == printed


def test_inference_of_the_paper() -> None:
    """Table 1: 3.7e9 for small at 128 tokens, the discriminator's head included."""
    model = transformer(256, 12, sequence_length=128, vocab_size=BERT_VOCABULARY, embedding_size=128)
    assert f"{(model.body + model.binary_head) * 128:.2e}" == "3.68e+09"


def total(products: Counter[Product]) -> int:
    return sum(count * product.flops for product, count in products.items())


@pytest.mark.parametrize("causal", [False, True])
def test_products_by_hand(causal: bool) -> None:
    layer, inputs = nn.Linear(3, 5), torch.randn(2, 7, 3, requires_grad=True)
    with RecordProducts() as recording:
        layer(inputs).sum().backward()
    assert sum(recording.products.values()) == 3
    assert {product.flops for product in recording.products} == {2 * 14 * 3 * 5}
    query, key, value = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    with RecordProducts() as recording:
        nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal).sum().backward()
    assert recording.flops == 6 * 2 * (2 * 3) * 16 * 16 * 8


@pytest.mark.parametrize("name", objectives.names())
def test_the_products_of_a_step_are_those_that_the_arithmetic_counts(name: str) -> None:
    objective, _, step = small(name)
    (phase,) = objective.phases(10)
    expected = executed_flops(objective.forward_passes(phase), LENGTH, ROWS)
    # 15 % of 40 positions, where the arithmetic has 15 % of 42; special tokens have no word predicted; hence not equal. The keys
    # of the distances of an XLNet, which all rows share, are not counted, and these rows are few.
    assert total(record_products(objective, step)) == pytest.approx(expected, rel=0.08 if name == "permutation-lm" else 0.04)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_attention_by_a_kernel_counts_as_on_the_plain_path(checkpointing: bool) -> None:
    objective, _, step = small("rtd", checkpointing=checkpointing)
    objective.train()
    with_kernels = record_products(objective, step)
    with kernels.switched_off():
        plain = record_products(objective, step)
    assert total(with_kernels) == total(plain)
    attention = [
        sum(count * product.flops for product, count in products.items() if product.batch) for products in (with_kernels, plain)
    ]
    assert attention[0] == attention[1]


def test_recording_leaves_the_networks_as_they_were() -> None:
    objective, *_ = small("rtd")
    with pytest.raises(ZeroDivisionError):
        record_products(objective, lambda: 1 / 0)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in objective.modules())


def test_a_larger_product_takes_longer() -> None:
    cpu = torch.device("cpu")
    times = [
        shortest_time(Product(0, *sizes, ((0, 1), (0, 1)), torch.float32), cpu, 0.001) for sizes in ((256, 256, 256), (4, 8, 16))
    ]
    assert times[0] > times[1] > 0
    assert shortest_time(Product(2, 3, 5, 4, ((0, 2, 1), (0, 1, 2)), torch.bfloat16), cpu, 0.001) > 0
