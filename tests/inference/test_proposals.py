"""The generator's likeliest tokens for each place, against one plain call of the network."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from discern.inference.proposals import Proposals, Proposer, propose
from discern.models.base import Network
from discern.models.config import build_config
from discern.models.electra.encoder import BertEncoder
from discern.models.embeddings import Embeddings
from discern.models.heads import MaskedLMHead
from discern.models.two_tower.encoder import two_tower_generator
from tests.parity.small_networks import make_noisy
from tests.support import SPECIAL

SIZES = build_config(
    num_layers=1, hidden_size=8, embedding_size=8, num_heads=2, feedforward_size=16, max_positions=16, hidden_dropout=0
)
V = 23


def network(kind: str) -> Network:
    embeddings = Embeddings(V, 8, SIZES)
    if kind == "masked":
        made = Network(BertEncoder(embeddings, SIZES), MaskedLMHead(SIZES, embeddings.word))
    else:
        made = two_tower_generator(embeddings, SIZES)
    make_noisy(torch.nn.ModuleList([made.encoder, made.head]))
    made.encoder.eval(), made.head.eval()
    return made


def asked(
    kind: str, texts: Sequence[Sequence[int]], window_size: int = 14, count: int = 5, tokens: int = 4096
) -> list[list[Proposals]]:
    return propose(Proposer(network(kind), SPECIAL), texts, window_size, count, lambda _: None, tokens)


def by_hand(kind: str, ids: list[int], place: int) -> torch.Tensor:
    """Probabilities at one place, told from all the others."""
    row = torch.tensor([[SPECIAL.cls, *ids, SPECIAL.sep]])
    if kind == "masked":
        row[0, place + 1] = SPECIAL.mask
    with torch.no_grad():
        return network(kind).token_logits(row)[0, place + 1].softmax(-1)


@pytest.mark.parametrize("kind", ["masked", "two-tower"])
def test_each_place_is_told_from_all_the_others(kind: str) -> None:
    ids = [7, 9, 9, 11, 20]
    (found,) = asked(kind, [ids])
    assert len(found) == len(ids)
    for place, said in enumerate(found):
        expected = by_hand(kind, ids, place)
        assert said.own == pytest.approx(float(expected[ids[place]]), abs=1e-6)
        ranked = [number for number in expected.argsort(descending=True).tolist() if number > 4][:5]
        assert said.ids == ranked, "special tokens are not named"
        assert said.probabilities == pytest.approx(expected[ranked].tolist(), abs=1e-6)


@pytest.mark.parametrize("kind", ["masked", "two-tower"])
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_batches_change_nothing(kind: str, tokens: int) -> None:
    texts = [[7, 9, 9, 11, 20, 5], [], [6]]
    for one, other in zip(asked(kind, texts), asked(kind, texts, tokens=tokens), strict=True):
        assert [said.ids for said in one] == [said.ids for said in other]
        assert [said.own for said in one] == pytest.approx([said.own for said in other], abs=1e-6)
    assert [len(text) for text in asked(kind, texts)] == [6, 0, 1]


def test_a_long_text_is_read_in_windows() -> None:
    ids = [5 + number % 17 for number in range(11)]
    (found,) = asked("masked", [ids], window_size=6)
    assert len(found) == 11
    # Windows start at 0, 3 and 5: place 3 has two tokens to its right in the first and none to its left in the second.
    assert found[3].own == pytest.approx(float(by_hand("masked", ids[:6], 3)[ids[3]]), abs=1e-6)
    assert found[10].own == pytest.approx(float(by_hand("masked", ids[5:], 5)[ids[10]]), abs=1e-6)


def test_no_more_than_the_vocabulary_is_named() -> None:
    ((said,),) = asked("masked", [[7]], count=100)
    assert sorted(said.ids) == list(range(5, V))


def test_each_generator_is_asked_in_its_own_way() -> None:
    places = torch.tensor([True, False, True])
    assert Proposer(network("masked"), SPECIAL).rows_to_predict(places).tolist() == [[True, False, False], [False, False, True]]
    assert Proposer(network("two-tower"), SPECIAL).rows_to_predict(places).tolist() == [[True, False, True]]
