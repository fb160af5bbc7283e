"""The XLNet encoder by hand, and what may influence what."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from discern.errors import ConfigError
from discern.models.base import build_embeddings, build_encoder, initialize
from discern.models.electra.encoder import BertEncoder
from discern.models.heads import MaskedLMHead
from discern.models.layers import Dropout, Embeddings
from discern.models.two_stream import Factorization, Remembering, update_memory
from discern.models.xlnet.encoder import XLNetEncoder
from discern.models.xlnet.relative_attention import HIDDEN, OTHER, SAME, distances, sinusoids, stream_mask
from tests.parity.small_xlnet import build_network, encoder_of, rows, sizes
from tests.paths import on_path

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
BATCH, LENGTH = 3, 10


@pytest.fixture(params=["kernels", "plain"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from on_path(request.param)


@pytest.fixture
def encoder() -> XLNetEncoder:
    return encoder_of(build_network(sizes()))


def in_order(positions: list[int]) -> Factorization:
    """From left to right; each of these positions is predicted."""
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1).expand(BATCH, -1, -1)
    return Factorization(visible, torch.tensor(positions).expand(BATCH, -1))


def changed(ids: Tensor, position: int) -> Tensor:
    """With another token there."""
    other = ids.clone()
    other[:, position] = 5 + (other[:, position] - 4) % 90
    return other


def test_distances_and_their_waves_by_hand() -> None:
    assert distances(2, 3).tolist() == [3, 2, 1, 0, -1]
    waves = sinusoids(torch.tensor([[3.0, 0.0, -1.0]]), 4, 0)[0]
    expected = [[math.sin(x), math.sin(x / 100), math.cos(x), math.cos(x / 100)] for x in (3, 0, -1)]
    torch.testing.assert_close(waves, torch.tensor(expected))
    assert torch.equal(sinusoids(torch.tensor([[7.0, -7.0]]), 4, 5), sinusoids(torch.tensor([[5.0, -5.0]]), 4, 0))


def test_what_queries_see_by_hand() -> None:
    """Position 0 sees nothing, 1 sees 0 and 2; two positions of memory, which are of segment 0, as position 0 is."""
    ids, segments = torch.zeros(1, 3, dtype=torch.long), torch.tensor([[0, 1, 1]])
    visible = torch.tensor([[[False, False, False], [True, False, True], [True, True, False]]])
    content = stream_mask(ids, visible, segments, 2)
    assert content.relation is not None
    assert content.relation[0].tolist() == [
        [SAME, SAME, SAME, HIDDEN, HIDDEN],
        [OTHER, OTHER, OTHER, SAME, SAME],
        [OTHER, OTHER, OTHER, SAME, SAME],
    ]
    assert content.starts.tolist() == [[3, 2, 1]]
    query = stream_mask(ids, visible, segments, 0, torch.tensor([[1, 0]]))
    assert query.relation is not None
    assert query.relation[0].tolist() == [[OTHER, HIDDEN, SAME], [HIDDEN, HIDDEN, HIDDEN]]
    assert query.starts.tolist() == [[2, 3]]
    assert query.blind is not None
    assert query.blind.tolist() == [[False, True]]
    assert stream_mask(ids, visible, segments, 2, torch.tensor([[1, 0]])).blind is None, "memory is seen by all"


def test_a_copy_of_a_compiled_encoder_runs_on_its_own_weights(encoder: XLNetEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    # Like a compiled function, a function of its own, not a method that a copy would bind to itself.
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *args, **kwargs: function(*args, **kwargs))
    ids, segments = rows(BATCH, LENGTH)
    original = copy.deepcopy(encoder)
    original.compile(backend="eager")
    own = copy.deepcopy(original)
    own.compile(backend="eager")
    own.two_streams(ids, in_order([0, 4]), segments).query.sum().backward()
    assert all(parameter.grad is None for parameter in original.parameters())
    assert own.embeddings.word.weight.grad is not None


def test_forgetting() -> None:
    old, new = torch.zeros(1, 1, 3, 1), torch.ones(1, 1, 2, 1, requires_grad=True)
    assert update_memory(old, new, 4).flatten().tolist() == [0, 0, 1, 1]
    assert update_memory(None, new, 4).flatten().tolist() == [1, 1]
    assert update_memory(old, new, 1).flatten().tolist() == [1]
    assert update_memory(old, new, 0).shape == (1, 1, 0, 1)
    assert not update_memory(old, new, 4).requires_grad


@torch.no_grad()
def test_a_prediction_depends_on_what_it_may_see_and_on_nothing_else(encoder: XLNetEncoder) -> None:
    ids, segments = rows(BATCH, LENGTH)
    order = in_order([0, 4, 9])
    before = encoder.two_streams(ids, order, segments).query
    for position in range(LENGTH):
        after = encoder.two_streams(changed(ids, position), order, segments).query
        moved = (after - before).abs().amax((0, 2)) > 1e-6
        assert moved.tolist() == [False, position < 4, position < 9]


@torch.no_grad()
def test_who_sees_nothing_learns_nothing_of_any_token_or_place(encoder: XLNetEncoder) -> None:
    ids, segments = rows(BATCH, LENGTH)
    nobody = Factorization(torch.zeros(BATCH, LENGTH, LENGTH, dtype=torch.bool), torch.arange(LENGTH).expand(BATCH, -1))
    states = encoder.two_streams(ids, nobody, segments).query
    torch.testing.assert_close(states, states[:1, :1].expand_as(states), **TOLERANCE)


@torch.no_grad()
def test_content_of_the_first_part_knows_nothing_of_the_second(encoder: XLNetEncoder) -> None:
    """And so neither does what is remembered of it."""
    ids, segments = rows(BATCH, LENGTH)
    visible = torch.ones(BATCH, LENGTH, LENGTH, dtype=torch.bool)
    visible[:, :6, 6:] = False
    order, much = Factorization(visible, torch.zeros(BATCH, 1, dtype=torch.long)), Remembering(6, 20)
    first = encoder.two_streams(ids, order, segments, remembering=much).memory
    second = encoder.two_streams(changed(ids, 8), order, segments, remembering=much).memory
    third = encoder.two_streams(changed(ids, 5), order, segments, remembering=much).memory
    assert first is not None
    assert second is not None
    assert third is not None
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


@torch.no_grad()
def test_a_memory_of_zeros_is_another_than_none(encoder: XLNetEncoder) -> None:
    ids, segments = rows(BATCH, LENGTH)
    order = in_order([4])
    zeros = torch.zeros(3, BATCH, 5, 32)
    without, empty = (
        encoder.two_streams(ids, order, segments).query,
        encoder.two_streams(ids, order, segments, memory=zeros).query,
    )
    assert (without - empty).abs().max() > 1e-3


@torch.no_grad()
def test_memory_stands_before_the_row(encoder: XLNetEncoder) -> None:
    """Two parts, the first of which sees itself alone, give the second what memory of the first gives it."""
    ids, segments = rows(BATCH, 2 * LENGTH)[0], torch.zeros(BATCH, 2 * LENGTH, dtype=torch.long)
    visible = torch.ones(BATCH, 2 * LENGTH, 2 * LENGTH, dtype=torch.bool)
    visible[:, :LENGTH, LENGTH:] = False
    whole = encoder.content_stream(ids, visible, segments).hidden[:, LENGTH:]
    memory = encoder.content_stream(ids[:, :LENGTH], None, segments[:, :LENGTH], remembering=Remembering(LENGTH, LENGTH)).memory
    second = encoder.content_stream(ids[:, LENGTH:], None, segments[:, LENGTH:], memory=memory).hidden
    torch.testing.assert_close(second, whole, **TOLERANCE)


@torch.no_grad()
def test_reversed_text_reads_as_it_would_forwards(encoder: XLNetEncoder) -> None:
    """A row backwards with distances of the other sign is the row; whichever rows of the batch are reversed."""
    ids, segments = rows(4, LENGTH)
    order = Factorization(torch.rand(4, LENGTH, LENGTH) < 0.6, torch.tensor([[1, 7]]).expand(4, -1))
    expected = encoder.two_streams(ids, order, segments, remembering=Remembering(LENGTH, LENGTH))
    assert expected.memory is not None
    for flags in ([False, True, False, True], [True, True, True, True], [True, False, False, False]):
        backwards = torch.tensor(flags)

        def turned(values: Tensor, *axes: int, backwards: Tensor = backwards) -> Tensor:
            return torch.where(backwards.view(-1, *[1] * (values.ndim - 1)), values.flip(axes), values)

        positions = torch.where(backwards[:, None], LENGTH - 1 - order.positions, order.positions)
        given = Factorization(turned(order.visible, 1, 2), positions)
        found = encoder.two_streams(
            turned(ids, 1), given, turned(segments, 1), is_reversed=backwards, remembering=Remembering(LENGTH, LENGTH)
        )
        assert found.memory is not None
        torch.testing.assert_close(found.query, expected.query, **TOLERANCE)
        torch.testing.assert_close(turned(found.memory.transpose(0, 1), 2), expected.memory.transpose(0, 1), **TOLERANCE)


@torch.no_grad()
def test_padding_may_stand_on_either_side(encoder: XLNetEncoder) -> None:
    ids, segments = rows(1, LENGTH)
    alone = encoder(ids[:, :6], None, segments[:, :6])
    filler = torch.full((1, 4), 7)
    real = torch.tensor([[True] * 6 + [False] * 4])
    right = encoder(torch.cat([ids[:, :6], filler], 1), real, torch.cat([segments[:, :6], filler], 1))
    left = encoder(torch.cat([filler, ids[:, :6]], 1), real.flip(1), torch.cat([filler, segments[:, :6]], 1))
    torch.testing.assert_close(right[:, :6], alone, **TOLERANCE)
    torch.testing.assert_close(left[:, 4:], alone, **TOLERANCE)


@torch.no_grad()
def test_documents_of_a_row_do_not_see_each_other(encoder: XLNetEncoder) -> None:
    ids, segments = rows(1, LENGTH)
    documents = torch.tensor([[0] * 4 + [1] * 6])
    together = encoder(ids, None, segments, document_ids=documents)
    torch.testing.assert_close(together[:, :4], encoder(ids[:, :4], None, segments[:, :4]), **TOLERANCE)
    torch.testing.assert_close(together[:, 4:], encoder(ids[:, 4:], None, segments[:, 4:]), **TOLERANCE)


def test_one_token_and_no_rows(encoder: XLNetEncoder) -> None:
    assert encoder(torch.tensor([[5]])).shape == (1, 1, 32)
    assert encoder(torch.zeros(0, 4, dtype=torch.long)).shape == (0, 4, 32)
    nothing = Factorization(torch.ones(2, 4, 4, dtype=torch.bool), torch.zeros(2, 0, dtype=torch.long))
    assert encoder.two_streams(torch.full((2, 4), 6), nothing).query.shape == (2, 0, 32)


def test_only_whether_segments_are_the_same_counts(encoder: XLNetEncoder) -> None:
    ids, segments = rows(BATCH, LENGTH)
    torch.testing.assert_close(encoder(ids, None, segments), encoder(ids, None, segments * 38 + 2), **TOLERANCE)
    torch.testing.assert_close(encoder(ids, None, None), encoder(ids, None, torch.full_like(ids, 3)), **TOLERANCE)


def test_recomputation_changes_no_gradient() -> None:
    ids, segments = rows(BATCH, LENGTH)
    found = []
    for checkpointing in (False, True):
        network = build_network(sizes(hidden_dropout=0.2, attention_dropout=0.2))
        part = encoder_of(network).train()
        part.gradient_checkpointing = checkpointing
        torch.manual_seed(1)
        memory = torch.zeros(3, BATCH, 4, 32)
        part.two_streams(ids, in_order([2, 5]), segments, memory=memory).query.square().sum().backward()
        found.append({name: value.grad for name, value in part.named_parameters()})
    for name, gradient in found[0].items():
        assert gradient is not None
        torch.testing.assert_close(found[1][name], gradient, **TOLERANCE)


def test_dropout_falls_on_tokens_queries_distances_probabilities_and_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not inside the feed-forward part; of the last block on the queries alone."""
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(Dropout, "forward", lambda _, values: shapes.append(tuple(values.shape)) or values)
    part = encoder_of(build_network(sizes(num_layers=2)))
    from discern import kernels

    with kernels.switched_off():
        part.two_streams(torch.full((2, 8), 5), Factorization(torch.ones(2, 8, 8) > 0, torch.zeros(2, 3, dtype=torch.long)))
    outside = [(1, 16, 32), (6, 32), (2, 8, 32)]
    first = [(4, 2, 8, 8), (4, 2, 3, 8), (22, 32), (22, 32)]
    last = [(4, 2, 3, 8), (6, 32), (6, 32)]
    assert shapes == [*outside, *first, *last, (2, 3, 32)]


def test_weights_at_step_0() -> None:
    model = sizes(hidden_size=128, embedding_size=128, initializer_range=0.05)
    part = build_encoder(build_embeddings(300, 128, model), model)
    initialize(part, torch.Generator().manual_seed(0), model)
    for name, value in part.named_parameters():
        if name.endswith("norm.weight"):
            assert (value == 1).all(), name
        elif name.endswith(("expand.bias", "contract.bias", "norm.bias")):
            assert (value == 0).all(), name
        else:
            # Normal, and not cut at two deviations; within five standard errors.
            assert float(value.detach().std()) == pytest.approx(0.05, rel=5 / (2 * value.numel()) ** 0.5), name
    assert float(part.get_parameter("blocks.0.expand.weight").detach().abs().max()) > 0.15


def test_factorized_embeddings_are_refused() -> None:
    model = sizes(embedding_size=16)
    with pytest.raises(ConfigError) as refused:
        build_encoder(build_embeddings(50, model.embedding_size, model), model)
    assert "embedding_size=32" in str(refused.value.hint)


def test_embeddings_with_positions_are_refused() -> None:
    with pytest.raises(ConfigError, match="words without positions"):
        build_encoder(Embeddings(50, 32, sizes()), sizes())


def test_memory_of_another_network_is_refused(encoder: XLNetEncoder) -> None:
    ids, segments = rows(BATCH, LENGTH)
    with pytest.raises(ValueError, match="3 blocks and 3 rows"):
        encoder.two_streams(ids, in_order([4]), segments, memory=torch.zeros(2, BATCH, 5, 32))


@torch.no_grad()
def test_arithmetic_is_within_the_bound_of_masked_language_modeling() -> None:
    """At length 128 without memory, of the small shape: 1.22 times the products of BERT and its head, forward; 1.6 at most."""
    size, length, count, vocabulary = 256, 128, 2, 32_000
    shape = {"hidden_size": size, "embedding_size": size, "num_heads": 4, "feedforward_size": 1024, "num_layers": 2}
    ours = encoder_of(build_network(sizes(**shape)))
    ids, segments = rows(count, length)
    order = Factorization(torch.rand(count, length, length) < 0.5, torch.arange(21).expand(count, -1))
    bert_sizes = sizes(**shape, encoder="bert")
    embeddings = Embeddings(vocabulary, size, bert_sizes)
    bert, head = BertEncoder(embeddings, bert_sizes), MaskedLMHead(bert_sizes, embeddings.word)
    from discern import kernels

    with kernels.switched_off():
        with FlopCounterMode(display=False) as found:
            ours.two_streams(ids, order, segments)
            nn.functional.linear(torch.zeros(count * 21, size), torch.zeros(vocabulary, size))
        with FlopCounterMode(display=False) as reference:
            head(bert(ids)[:, :21])
    assert found.get_total_flops() < 1.3 * reference.get_total_flops()
