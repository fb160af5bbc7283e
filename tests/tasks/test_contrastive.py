"""Contrastive training: texts encoded one by one, cached gradients equal to direct ones, retrieval by hand, two ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from discern import kernels
from discern.corruption.randomness import Randomness
from discern.data.tokenizer import special_tokens, vocab_size
from discern.errors import ConfigError, DataError
from discern.models.base import Encoder, build_embeddings, build_encoder, initialize
from discern.models.config import build_config
from discern.tasks import contrastive_objective
from discern.tasks.base import Labels, Reading, TextEncoder, TextGroup
from discern.tasks.contrastive import RETRIEVAL_METRICS, SIMILARITY_METRICS, Contrastive, ContrastiveConfig, retrieval_scores
from discern.tasks.contrastive_objective import ContrastiveObjective
from discern.tasks.features import Features, Ragged, TaskBatch, TaskRowsInOrder
from discern.tasks.supervised import outputs_of, supervised
from tests.processes import run_ranks
from tests.small.tokenizers import small_tokenizer

TOKENIZER = small_tokenizer("wordpiece, lower-cased")
TEXT = TextEncoder(TOKENIZER, special_tokens(TOKENIZER))
WORDS = "the model reads a file of tensors and returns none at all".split()
GROUPS = [
    TextGroup(str(n), tuple(" ".join(WORDS[n + k : n + 2 * k + 3]) for k in range(2 + n % 2)))  # every second has a negative
    for n in range(6)
]

JUDGED = [TextGroup(str(n), group.texts[:2], float(n % 3)) for n, group in enumerate(GROUPS)]


def task(metrics: tuple[str, ...] = RETRIEVAL_METRICS, **config: Any) -> Contrastive:
    return Contrastive("pairs", ContrastiveConfig(**config), metrics, Labels(kind="vectors", pairs=True))


def encoder(kind: str = "bert", dropout: float = 0.0) -> Encoder:
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "embedding_size": 32, "num_heads": 2, "feedforward_size": 48}
    sizes |= {"local_window": 8} if kind == "modernbert" else {}
    config = build_config(encoder=kind, hidden_dropout=dropout, attention_dropout=dropout, **sizes)
    built = build_encoder(build_embeddings(vocab_size(TOKENIZER), config.embedding_size, config), config)
    initialize(built, torch.Generator().manual_seed(0), config)
    return built


def objective(kind: str = "bert", dropout: float = 0.0, frame: str = "cls-first", **config: Any) -> ContrastiveObjective:
    made = supervised(encoder(kind, dropout), {"pairs": task(**config)}, dropout=dropout, frame=frame)
    assert isinstance(made, ContrastiveObjective)
    return made


def features_of(groups: Sequence[TextGroup]) -> Features:
    return task().encode(groups, TEXT, labeled=True)


def batch_of(groups: Sequence[TextGroup]) -> TaskBatch:
    places = np.arange(len(groups))
    return TaskRowsInOrder({"pairs": features_of(groups)}).batch(places, places)


def step(made: ContrastiveObjective, groups: Sequence[TextGroup] = GROUPS) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a step, and its gradients by name."""
    made.train()
    torch.manual_seed(5)
    batch = batch_of(groups)
    randomness = Randomness(0, 0, batch.example_index)
    output = made(made.corrupt(batch, randomness), randomness)
    term = output.terms["pairs"]
    assert term.count == len(groups)
    term.total.backward()
    return float(term.total.detach()), {name: each.grad for name, each in made.named_parameters() if each.grad is not None}


@pytest.mark.parametrize(("kind", "frame"), [("bert", "cls-first"), ("xlnet", "cls-last"), ("modernbert", "cls-first")])
@pytest.mark.parametrize(("pooling", "part"), [("mean-all", slice(None)), ("mean", slice(1, -1)), ("cls", slice(0, 1))])
def test_the_vector_of_a_text_is_the_mean_of_some_states_of_it_alone(kind: str, frame: str, pooling: str, part: slice) -> None:
    made = objective(kind, frame=frame, pooling=pooling)
    together, _ = outputs_of(made, "pairs", features_of(GROUPS))
    for group, output in zip(GROUPS, together, strict=True):
        for vector, text in zip(output["vectors"], group.texts, strict=False):
            ids = torch.tensor([[TEXT.special.cls, *next(TEXT.ids([text])), TEXT.special.sep]])
            with torch.no_grad():
                states = made.hidden_states(ids, None, torch.zeros_like(ids))[0]
            np.testing.assert_allclose(vector, states[part].mean(0), atol=2e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
@pytest.mark.parametrize(("kind", "groups"), [("bert", GROUPS), ("modernbert", JUDGED)])
def test_cached_gradients_are_the_direct_ones(kind: str, groups: list[TextGroup], dtype: torch.dtype, tolerance: float) -> None:
    direct_loss, direct = step(objective(kind).to(dtype), groups)
    cached_loss, cached = step(objective(kind, texts_per_pass=3).to(dtype), groups)
    assert cached_loss == pytest.approx(direct_loss, rel=1e-5)
    torch.testing.assert_close(cached, direct, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("plain", [False, True])
def test_a_repeated_pass_drops_the_same_units(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, the cached gradient is that of the loss that was computed: a step along it changes the loss as it says."""
    if plain:
        monkeypatch.setattr(kernels, "usable", lambda *_, **__: False)
    made = objective(dropout=0.2, texts_per_pass=4).double()
    loss, gradients = step(made)
    made.zero_grad()
    size = 1e-6
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name in gradients:
                parameter += size * gradients[name]
    expected = sum(float(each.square().sum()) for each in gradients.values())
    assert (step(made)[0] - loss) / size == pytest.approx(expected, rel=1e-2)


def test_a_text_twice_has_two_vectors_by_dropout_alone() -> None:
    made, batch = objective(dropout=0.1), batch_of([TextGroup("0", ("the model", "the model"))])
    randomness = Randomness(0, 0, batch.example_index)
    for training in (True, False):
        vectors = made.train(training)(made.corrupt(batch, randomness), randomness).observations["pairs/vectors"]
        assert bool((vectors[:, 0] - vectors[:, 1]).abs().max() > 1e-3) is training


def test_crops_are_spans_of_their_texts_in_their_frames() -> None:
    lengths, special = (1, 5, 30, 60), TEXT.special
    texts = [[special.cls, *range(10, 10 + length), special.sep] for length in lengths]
    segments = [[0] * len(text) + [1] * len(text) for text in texts]
    features = Features(Ragged.of([text * 2 for text in texts]), Ragged.of(segments), np.arange(4), {"texts": np.ones((4, 2))})
    made, places = objective(positives="crop"), np.arange(4)
    batch = TaskRowsInOrder({"pairs": features}).batch(places, places)
    seen = set()
    for number in range(200):
        tokens = made.corrupt(batch, Randomness(0, number, batch.example_index)).tokens
        for row, length in enumerate(lengths):
            crops = [tokens.input_ids[row][tokens.attention_mask[row] & (tokens.token_type_ids[row] == n)] for n in (0, 1)]
            for first, *words, last in (crop.tolist() for crop in crops):
                assert (first, last) == (special.cls, special.sep)
                assert words == list(range(words[0], words[0] + len(words)))
                assert set(words) <= set(range(10, 10 + length))
                assert min(max(round(0.1 * length), 4), length) <= len(words) <= min(max(length // 2, 4), length)
        seen |= {tuple(crop.tolist()) for crop in crops}
    assert len(seen) > 300, "the crops of the longest text differ from step to step and from each other"
    assert {len(crop) - 2 for crop in seen} == set(range(6, 31))
    assert {word for crop in seen for word in crop[1:-1]} == set(range(10, 70))


@pytest.mark.parametrize(("positives", "second"), [("dropout", "the model reads"), ("crop", "the model")])
def test_only_texts_alone_are_cropped(positives: str, second: str) -> None:
    made, batch = objective(positives=positives), batch_of([TextGroup("0", ("the model reads", second))])
    assert made.corrupt(batch, Randomness(0, 0, batch.example_index)).tokens.input_ids is batch.input_ids


@pytest.mark.parametrize("groups", [GROUPS, JUDGED], ids=["pairs", "judged pairs"])
def test_the_loss_of_an_evaluation_does_not_depend_on_the_batches(
    monkeypatch: pytest.MonkeyPatch, groups: list[TextGroup]
) -> None:
    monkeypatch.setattr(contrastive_objective, "_ROWS", 4)  # two blocks of rows
    made, features = objective(matryoshka=(8,)), features_of(groups)
    _, whole = outputs_of(made, "pairs", features)
    evaluator = made.eval().evaluator()
    for places in (np.array([0, 1]), np.array([2]), np.array([3, 4, 5])):
        batch = TaskRowsInOrder({"pairs": features}).batch(places, places)
        randomness = Randomness(0, 0, batch.example_index)
        corrupted = made.corrupt(batch, randomness)
        evaluator.update(made(corrupted, randomness), corrupted)
    assert evaluator.loss("pairs") == pytest.approx(whole, rel=1e-5)
    assert whole == pytest.approx(step(made, groups)[0] / 6, rel=1e-4)


def on_a_circle(groups: Sequence[TextGroup], angles: dict[str, float]) -> list[dict[str, Any]]:
    """Outputs whose vectors are at these angles in the plane, in radians."""
    corners = ([[np.cos(angles[text]), np.sin(angles[text])] for text in group.texts] for group in groups)
    return [{"vectors": np.array(each, np.float32)} for each in corners]


def test_judged_pairs_are_scored_by_their_cosines() -> None:
    judged = [TextGroup(text, ("a", text), score) for text, score in (("b", 1.0), ("c", 3.0), ("d", 5.0))]
    made = task(SIMILARITY_METRICS)
    predictions = made.predict(judged, features_of(judged), on_a_circle(judged, {"a": 0.0, "b": 1.5, "c": 0.1, "d": 0.5}))
    assert [prediction["similarity"] for prediction in predictions] == pytest.approx(np.cos([1.5, 0.1, 0.5]), abs=1e-6)
    assert made.score(judged, predictions).values["spearman"] == pytest.approx(0.5)
    assert [(record["pair"], record["badness"]) for record in made.mistakes(judged, predictions)] == [("c", 0.5), ("d", 0.5)]
    assert made.failure(judged, [{"similarity": 1.0}] * 3)
    assert not made.failure(judged, predictions)


def test_anchors_search_their_positives_among_all_texts() -> None:
    groups = [
        TextGroup("0", ("a", "b")),
        TextGroup("1", ("a", "c")),  # a second positive of the same anchor
        TextGroup("2", ("d", "e", "f")),
        TextGroup("3", ("b", "a")),  # its own text is a positive of others, and is not found
    ]
    made = task()
    outputs = on_a_circle(groups, {"a": 0.0, "b": 0.1, "c": 0.4, "d": 1.0, "e": 1.3, "f": 1.1})
    predictions = made.predict(groups, features_of(groups), outputs)
    assert [(each["text"], each["ranks"], each["found"]) for each in predictions] == [
        ("a", [1, 2], "b"),
        ("d", [2], "f"),  # the negative is nearer
        ("b", [1], "a"),
    ]
    scores = made.score(groups, predictions).values
    assert tuple(scores) == RETRIEVAL_METRICS
    assert scores["mrr"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert scores["recall_at_1"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert scores["ndcg_at_10"] == pytest.approx((1 + 1 / np.log2(3) + 1) / 3)
    assert [record["text"] for record in made.mistakes(groups, predictions)] == ["d"]


def test_a_document_with_the_id_of_the_query_is_not_found_as_in_beir() -> None:
    groups = [
        TextGroup("q", ("a query",), relevant=(("d", 1.0),)),
        TextGroup("r", ("another",), relevant=(("r", 1.0),)),  # is judged, and found
        *(TextGroup(name, (f"document {name}",)) for name in ("q", "d", "r")),
    ]
    angles = {"a query": 0.0, "another": 1.0, "document q": 0.0, "document d": 0.1, "document r": 0.9}
    predictions = task().predict(groups, features_of(groups), on_a_circle(groups, angles))
    assert [(each["ranks"], each["found"]) for each in predictions] == [([1], "document d"), ([1], "document r")]


def test_vectors_that_are_all_the_same_find_nothing() -> None:
    predictions = task().predict(GROUPS, features_of(GROUPS), on_a_circle(GROUPS, defaultdict(float)))
    assert task().score(GROUPS, predictions).values["recall_at_1"] == 0


def test_grades_decide_the_best_order() -> None:
    value = retrieval_scores([{"ranks": [1, 2], "grades": [1.0, 3.0]}]).values["ndcg_at_10"]
    assert value == pytest.approx((1 + 3 / np.log2(3)) / (3 + 1 / np.log2(3)))


def test_what_cannot_be_learned_from_is_refused() -> None:
    same_pair = [TextGroup("0", ("a", "b"))] * 3
    same_score = [TextGroup(str(n), ("a", str(n)), 3.0) for n in range(3)]
    for groups, said in ((same_pair, "has a single pair"), (same_score, "have the score 3")):
        with pytest.raises(DataError, match=rf"made\.csv {said}"):
            Contrastive.learn(Reading(tuple(groups), "made.csv"), ContrastiveConfig(), ())
    with pytest.raises(ConfigError, match="trained alone, but there are 2 tasks"):
        supervised(encoder(), {"pairs": task(), "more": task()})


def test_the_baseline_compares_as_the_network() -> None:
    made = task()
    (baseline,) = made.baselines()
    predictions = baseline.predict(GROUPS, GROUPS)
    assert set(made.score(GROUPS, predictions).values) == set(RETRIEVAL_METRICS)
    judged = [TextGroup("x", ("the model", "the model"), 5.0), TextGroup("y", ("a", "?"), 0.0)]
    assert [each["similarity"] for each in baseline.predict(GROUPS, judged)] == [pytest.approx(1.0), 0.0]


PROGRAM = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel
from discern.corruption.randomness import Randomness
from discern.training.distributed import join_ranks
from tokenizers import Tokenizer
from tests.tasks import test_contrastive as shared

# A tokenizer that is trained anew may number its tokens otherwise.
shared.TEXT = shared.TextEncoder(Tokenizer.from_file(sys.argv[2]), shared.TEXT.special)
batch_of, objective = shared.batch_of, shared.objective
with join_ranks("cpu") as ranks:
    for name, passes, groups in (("0", 0, shared.GROUPS), ("2", 2, shared.GROUPS), ("judged", 0, shared.JUDGED)):
        # In float64: in float32, sums of gradients in another order differ by up to 0.3 %.
        made = objective(texts_per_pass=passes, symmetric=True, matryoshka=(8,)).double().train()
        model = DistributedDataParallel(made) if ranks.world_size > 1 else made
        batch, share = batch_of(groups), len(groups) // ranks.world_size
        batch = batch.rows(ranks.rank * share, (ranks.rank + 1) * share)
        randomness = Randomness(0, 0, batch.example_index)
        loss = model(made.corrupt(batch, randomness), randomness).terms["pairs"].total / len(groups)
        (loss * ranks.world_size).backward()
        total = ranks.sum_tensor(loss.detach().reshape(1))
        if ranks.writes:
            found = {key: each.grad for key, each in made.named_parameters() if each.grad is not None}
            save_file({**found, "loss": total}, Path(sys.argv[1]) / f"{name}.safetensors")
"""


def test_two_ranks_share_their_negatives(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    tokenizer = tmp_path / "tokenizer.json"
    TOKENIZER.save(str(tokenizer))
    for processes in (1, 2):
        (tmp_path / str(processes)).mkdir()
        run_ranks(processes, program, tmp_path / str(processes), tokenizer)
    for expected, place in (("0", "1/2"), ("0", "2/0"), ("0", "2/2"), ("judged", "2/judged")):
        alone, found = (load_file(tmp_path / f"{each}.safetensors") for each in (f"1/{expected}", place))
        torch.testing.assert_close(found, alone, atol=2e-5, rtol=1e-4)
