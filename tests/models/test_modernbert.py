"""The encoder of ModernBERT by itself: what a token sees, how heads begin, arithmetic, settings, and every objective on it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from discern.corruption.randomness import Randomness
from discern.models.attention import SelfAttention, Unpadding, visible_in_window
from discern.models.base import Encoder, build_embeddings, build_encoder, initialize
from discern.models.config import build_config
from discern.models.modernbert.config import ModernBertConfig
from discern.models.modernbert.encoder import ModernBertEncoder
from discern.models.rotary import frequencies, rotation
from discern.objectives import objectives
from discern.objectives.base import BuildSettings, Objective
from discern.types import TokenBatch
from tests.parity.small_networks import VOCABULARY, make_noisy, token_batch
from tests.paths import on_path

SIZES = {
    "encoder": "modernbert",
    "num_layers": 2,
    "hidden_size": 32,
    "embedding_size": 32,
    "num_heads": 4,
    "feedforward_size": 24,
}


@pytest.fixture(params=["kernels", "plain"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    for _ in on_path(request.param):
        yield request.param


def build(width: int = 32, **changes: Any) -> ModernBertEncoder:
    config = build_config({**SIZES, **changes})
    encoder = build_encoder(build_embeddings(97, width, config), config)
    assert isinstance(encoder, ModernBertEncoder)
    return encoder


def reached(encoder: Encoder, length: int, at: int) -> list[int]:
    """Positions whose state depends on the token at a position."""
    ids = torch.randint(5, 97, (1, length), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[0, at] += 1 if ids[0, at] < 90 else -1
    with torch.no_grad():
        before, after = encoder(ids), encoder(other)
    return [place for place in range(length) if not torch.equal(before[0, place], after[0, place])]


def test_a_window_reaches_half_its_width_in_each_direction(path: str) -> None:
    config = build_config(**SIZES)
    assert isinstance(config, ModernBertConfig)
    attention = SelfAttention(config, window=3)
    make_noisy(attention)
    hidden = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(1))
    layout = Unpadding(offsets=torch.tensor([0, 40]))
    if path == "plain":
        layout = Unpadding(visible_in_window(None, 40, 3, hidden.device))
    rotate = rotation(10_000.0, 8, torch.arange(40)[None])
    for at, seen_by in ((20, range(17, 24)), (1, range(5)), (39, range(36, 40))):
        other = hidden.clone()
        other[0, at] += 1
        with torch.no_grad():
            before, after = attention(hidden, layout, rotate), attention(other, layout, rotate)
        assert [place for place in range(40) if not torch.equal(before[0, place], after[0, place])] == list(seen_by)


@pytest.mark.usefixtures("path")
def test_full_attention_reaches_everything_and_documents_stay_apart() -> None:
    encoder = build().eval()
    make_noisy(encoder)
    assert reached(encoder, 30, 20) == list(range(30))
    ids = torch.randint(5, 97, (1, 30), generator=torch.Generator().manual_seed(1))
    documents = (torch.arange(30) > 11)[None].long()
    other = ids.clone()
    other[0, 20] = 5
    with torch.no_grad():
        before, after = (encoder(each, torch.ones_like(ids, dtype=torch.bool), None, None, documents) for each in (ids, other))
    assert torch.equal(before[0, :12], after[0, :12])
    assert not torch.equal(before[0, 12:], after[0, 12:])


def test_rotation_by_hand() -> None:
    """Head of width 4, theta 100: frequencies 1 and 1/10; halves rotate against each other."""
    assert frequencies(100.0, 4).tolist() == pytest.approx([1.0, 0.1])
    rotate = rotation(100.0, 4, torch.tensor([[0, 3]]))
    turned = rotate(torch.tensor([[[[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]]]]))[0, 0]
    assert turned[0].tolist() == [1, 2, 3, 4]
    expected = [
        math.cos(3) - 3 * math.sin(3),
        2 * math.cos(0.3) - 4 * math.sin(0.3),
        3 * math.cos(3) + math.sin(3),
        4 * math.cos(0.3) + 2 * math.sin(0.3),
    ]
    assert turned[1].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("theta", [10_000.0, 160_000.0])
def test_local_heads_begin_at_their_neighbors(theta: float) -> None:
    """Of the biases alone, most attention goes to the token aimed at: 0.77 with theta 10,000, 0.72 with 160,000."""
    encoder = build(
        hidden_size=192,
        embedding_size=192,
        num_heads=6,
        attention_bias=True,
        initialization="local",
        full_rope_theta=theta,
        local_rope_theta=theta,
    )
    initialize(encoder, torch.Generator().manual_seed(0), encoder.config)
    attention, width, length = encoder.blocks[1].attention, 32, 41
    rotate = rotation(theta, width, torch.arange(length)[None])
    query, key = (layer.bias.view(6, 1, width).expand(6, length, width)[None] for layer in (attention.query, attention.key))
    with torch.no_grad():
        shares = (rotate(query) @ rotate(key).transpose(-1, -2) / math.sqrt(width)).softmax(-1)[0]
    for head, offset in enumerate((-1, 1, -2, 2, -3, 3)):
        row = shares[head, 20]
        assert int(row.argmax()) == 20 + offset
        assert float(row[20 + offset]) == pytest.approx(0.77 if theta == 10_000 else 0.72, abs=0.01)
    # The whole layer, content included, still looks there.
    with torch.no_grad():
        hidden = torch.nn.functional.layer_norm(torch.randn(1, length, 192, generator=torch.Generator().manual_seed(1)), (192,))
        asked, held = (layer(hidden).view(1, length, 6, width).transpose(1, 2) for layer in (attention.query, attention.key))
        looked = (rotate(asked) @ rotate(held).transpose(-1, -2) / math.sqrt(width)).softmax(-1)[0, :, 5:-5]
    for head, offset in enumerate((-1, 1, -2, 2, -3, 3)):
        aimed = looked[head].gather(1, (torch.arange(5, length - 5) + offset)[:, None])
        assert float(aimed.mean()) > 0.4


def test_the_released_start_is_narrower_for_what_adds_to_the_residual() -> None:
    encoder = build(hidden_size=256, embedding_size=256, feedforward_size=384, num_layers=8)
    initialize(encoder, torch.Generator().manual_seed(0), encoder.config)
    cut = 0.8796  # of a normal cut at two deviations
    for block in encoder.blocks:
        for layer, std in (
            (block.expand, 0.02),
            (block.attention.key, 0.02),
            (block.attention.output, 0.005),
            (block.contract, 0.005),
        ):
            assert float(layer.weight.std()) == pytest.approx(std * cut, rel=0.03)
    head = objectives.load("rtd")
    objective: Objective = head(head.Config(), BuildSettings(encoder.config, VOCABULARY))
    objective.initialize(0)
    assert float(objective.get_parameter("discriminator_head.dense.weight").std()) == pytest.approx(0.005 * cut, rel=0.03)
    assert float(objective.get_parameter("discriminator_head.output.weight").std()) == pytest.approx(cut / 16, rel=0.15)


def test_flops_count_a_window_by_what_it_sees() -> None:
    """Width 4 (two to each side): of ten tokens, the first and last see three, the next four, the other six see five."""
    full, local = build(full_attention_every=1), build(full_attention_every=9, local_window=4)
    seen = (2 * 3 + 2 * 4 + 6 * 5) / 10
    assert full.forward_flops(10) - local.forward_flops(10) == pytest.approx(4 * 32 * (10 - seen))
    assert local.forward_flops(3) == full.forward_flops(3)
    assert full.forward_flops(10) == 2 * (2 * (4 * 32**2 + 3 * 32 * 24) + 4 * 32 * 10)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"hidden_size": 36, "num_heads": 4},
            "heads of width 9 .* cannot be rotated in pairs; set num_heads to one of",
        ),
        ({"hidden_size": 33, "num_heads": 3}, "cannot be rotated in pairs; choose an even hidden_size"),
        ({"initialization": "local"}, "set attention_bias=true"),
        ({"local_window": 1}, "local_window"),
        ({"full_attention_every": 0}, "full_attention_every"),
        ({"normalization": "pre"}, "normalization"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        build_config({**SIZES, **changes})


def test_a_generator_keeps_even_heads_and_aligned_widths() -> None:
    base = build_config(encoder="modernbert", hidden_size=768, embedding_size=768, num_heads=12, feedforward_size=2048)
    small = base.shrunk(0.33333, 1.0)
    assert (small.hidden_size, small.num_heads, small.feedforward_size) == (256, 4, 680)
    third = build_config(encoder="modernbert", hidden_size=256, embedding_size=256, num_heads=4, feedforward_size=704)
    small = third.shrunk(0.33333, 1.0)
    assert (small.hidden_size, small.num_heads, small.feedforward_size) == (88, 1, 232)
    assert third.shrunk(1.0, 0.5) == third.model_copy(update={"num_layers": 6})


def rows() -> TokenBatch:
    """Rows of 30 with padding; the second row has two documents."""
    batch = token_batch([30, 30, 11, 4])
    documents = torch.zeros_like(batch.input_ids)
    documents[1, 17:] = 1
    return replace(batch, document_ids=documents)


@pytest.mark.usefixtures("path")
def test_recomputation_changes_nothing() -> None:
    config = build_config({**SIZES, "local_window": 6, "num_layers": 4})
    plain, saving = (build_encoder(build_embeddings(97, 32, config), config, gradient_checkpointing=g) for g in (False, True))
    make_noisy(plain)
    saving.load_state_dict(plain.state_dict())
    batch, gradients = rows(), []
    for encoder in (plain, saving):
        encoder.train()
        encoder(batch.input_ids, *batch.context).square().sum().backward()
        gradients.append([value.grad for value in encoder.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None and b is not None)


OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"rtd, tying {tying}": ("rtd", {"tying": tying}) for tying in ("embeddings", "token", "none", "gradient-disentangled")},
    "rtd, one encoder": ("rtd", {"tying": "all", "generator_size": 1.0}),
    "rtd, bilinear": ("rtd", {"tying": "gradient-disentangled", "discriminator_head": "bilinear"}),
    "rtd, two towers": ("rtd", {"generator": "two-tower"}),
    "rtd, uniform": ("rtd", {"generator": "uniform"}),
    "rtd, contrastive": ("rtd", {"sentence_contrastive_weight": 1.0}),
    "rtd, adversarial": ("rtd", {"algorithm": "adversarial"}),
    "rtd, two stages": ("rtd", {"algorithm": "two-stage", "generator_size": 1.0, "tying": "none"}),
    "rtd, two stages, disentangled": ("rtd", {"algorithm": "two-stage", "generator_size": 1.0, "tying": "gradient-disentangled"}),
    **{name: (name, {}) for name in ("mlm", "electric", "rtd-masked-only", "replace-mlm", "all-tokens-mlm")},
}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("case", OBJECTIVES)
def test_every_objective_learns_on_it(case: str) -> None:
    """The loss of one batch falls under plain gradient descent, and every parameter of every phase has a gradient."""
    name, options = OBJECTIVES[case]
    kind = objectives.load(name)
    config = build_config({**SIZES, "hidden_size": 64, "embedding_size": 64, "local_window": 6})
    objective: Objective = kind(kind.Config(name=name, **options), BuildSettings(config, VOCABULARY))
    objective.initialize(0)
    optimizer = torch.optim.AdamW(objective.parameters(), lr=3e-3)
    batch = rows()
    random = Randomness(0, 0, batch.slot)
    losses, reached_by_gradient = [], set()
    for _ in range(8):
        output = objective(objective.corrupt(batch, random), random)
        loss = sum(term.weight * term.total / max(term.count, 1) for term in output.terms.values())
        losses.append(float(sum(term.total / max(term.count, 1) for term in output.terms.values())))
        optimizer.zero_grad()
        loss.backward()
        reached_by_gradient |= {key for key, value in objective.named_parameters() if value.grad is not None}
        optimizer.step()
    assert losses[-1] < losses[0] or case == "rtd, adversarial"  # its generator is not paid for being right
    assert all(map(math.isfinite, losses))
    assert reached_by_gradient == {key for key, _ in objective.named_parameters()}


def test_the_two_towers_see_all_but_the_token() -> None:
    kind = objectives.load("electric")
    config = build_config({**SIZES, "local_window": 4})
    objective: Objective = kind(kind.Config(generator_size=0.5), BuildSettings(config, VOCABULARY))
    make_noisy(objective)
    network = objective.eval().networks()["generator"]
    ids = torch.randint(5, 97, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = network.token_logits(ids)
        for at in range(12):
            other = ids.clone()
            other[0, at] = 5 if ids[0, at] != 5 else 6
            after = network.token_logits(other)
            assert [place for place in range(12) if torch.equal(before[0, place], after[0, place])] == [at]
