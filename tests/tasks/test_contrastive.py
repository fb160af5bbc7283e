"""Contrastive training: texts encoded one by one, cached gradients equal to direct ones, retrieval by hand, two ranks."""

from __future__ import annotations

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
from discern.models.base import Encoder, build_embeddings, build_encoder
from discern.models.config import build_config
from discern.models.initialization import initialize
from discern.tasks import contrastive_objective
from discern.tasks.base import Labels, TextEncoder
from discern.tasks.contrastive import SIMILARITY_METRICS, Contrastive, ContrastiveConfig
from discern.tasks.contrastive_objective import ContrastiveObjective
from discern.tasks.examples import Reading, TextGroup
from discern.tasks.features import Features, TaskBatch, TaskRowsInOrder
from discern.tasks.metrics.retrieval import RETRIEVAL_METRICS, Ranking, retrieval_scores
from discern.tasks.supervised import Split, outputs_of, supervised
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
    local = {"local_window": 8} if kind == "modernbert" else {}
    config = build_config(encoder=kind, hidden_dropout=dropout, attention_dropout=dropout, **sizes, **local)
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
@pytest.mark.parametrize("pooling", ["mean-all", "mean", "cls"])
def test_the_vector_of_a_text_does_not_depend_on_the_other_texts(kind: str, frame: str, pooling: str) -> None:
    made = objective(kind, frame=frame, pooling=pooling)
    together, _ = outputs_of(made, "pairs", features_of(GROUPS))
    for group, found in zip(GROUPS, together, strict=True):
        for place, text in enumerate(group.texts):
            (alone,), _ = outputs_of(made, "pairs", task().encode([TextGroup("0", (text,))], TEXT, labeled=False))
            np.testing.assert_allclose(found["vectors"][place], alone["vectors"][0], atol=2e-6)


@pytest.mark.parametrize(("pooling", "part"), [("mean-all", slice(None)), ("mean", slice(1, -1)), ("cls", slice(0, 1))])
def test_the_vector_is_the_mean_of_some_states(pooling: str, part: slice) -> None:
    made = objective(pooling=pooling)
    (found,), _ = outputs_of(made, "pairs", task().encode([TextGroup("0", ("the model",))], TEXT, labeled=False))
    ids = [TEXT.special.cls, *TEXT.ids(["the model"])[0], TEXT.special.sep]
    with torch.no_grad():
        states = made.eval().encoder(torch.tensor([ids]))[0]
    np.testing.assert_allclose(found["vectors"][0], states[part].mean(0), atol=1e-6)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_cached_gradients_are_the_direct_ones(kind: str, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if plain:
        monkeypatch.setattr(kernels, "usable", lambda *_, **__: False)
    direct_loss, direct = step(objective(kind))
    cached_loss, cached = step(objective(kind, texts_per_pass=3))
    assert cached_loss == pytest.approx(direct_loss, rel=1e-5)
    assert cached.keys() == direct.keys()
    for name in direct:
        torch.testing.assert_close(cached[name], direct[name], atol=1e-5, rtol=1e-4, msg=name)


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
    twice = [TextGroup(str(n), (group.texts[0], group.texts[0])) for n, group in enumerate(GROUPS)]
    made = objective(dropout=0.1)
    batch = batch_of(twice)
    randomness = Randomness(0, 0, batch.example_index)
    for training, differ in ((True, True), (False, False)):
        made.train(training)
        vectors = made(made.corrupt(batch, randomness), randomness).observations["pairs/vectors"]
        assert bool((vectors[:, 0] - vectors[:, 1]).abs().max() > 1e-3) is differ


@pytest.mark.parametrize("passes", [0, 3])
def test_judged_pairs_are_trained_by_the_order_of_their_scores(passes: int) -> None:
    made = objective(texts_per_pass=passes, temperature=0.5, matryoshka=(8,))
    loss, gradients = step(made, JUDGED)
    found, _ = outputs_of(made, "pairs", features_of(JUDGED))
    expected = 0.0
    for size in (8, 32):
        pairs = [each["vectors"][:, :size] for each in found]
        cosines = [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in pairs]
        gaps = [cosines[i] - cosines[j] for i in range(6) for j in range(6) if i % 3 < j % 3]
        expected += np.log(1 + np.exp(np.array(gaps) / 0.5).sum())
    assert loss == pytest.approx(6 * expected, rel=1e-4)
    assert all(bool(each.isfinite().all()) for each in gradients.values())


def test_only_texts_alone_are_cropped() -> None:
    text = " ".join(WORDS)
    groups = [TextGroup("0", (text, text)), TextGroup("1", (text, text + " model"))]
    for positives, is_cropped in (("dropout", False), ("crop", True)):
        made, batch = objective(positives=positives), batch_of(groups)
        found = made.corrupt(batch, Randomness(0, 0, batch.example_index)).tokens
        before, after = (each.attention_mask.sum(1).tolist() for each in (batch, found))
        assert after[1] == before[1]
        assert (after[0] <= before[0] // 2 + 3) is is_cropped, "each text keeps at most half of its tokens, and its frame"


# Judged pairs of which some have negatives, which are not used; batches then have different numbers of texts per row.
UNEVEN = [TextGroup(each.id, (*each.texts, "model")[: 2 + n // 3], each.score) for n, each in enumerate(JUDGED)]


@pytest.mark.parametrize("groups", [GROUPS, JUDGED, UNEVEN], ids=["pairs", "judged pairs", "judged pairs and negatives"])
def test_the_loss_of_an_evaluation_does_not_depend_on_the_batches(
    monkeypatch: pytest.MonkeyPatch, groups: list[TextGroup]
) -> None:
    monkeypatch.setattr(contrastive_objective, "_ROWS", 4)  # two blocks of rows
    made, features = objective(), features_of(groups)
    _, whole = outputs_of(made, "pairs", features)
    evaluator = made.eval().evaluator()
    rows = TaskRowsInOrder({"pairs": features})
    for places in (np.array([0, 1]), np.array([2]), np.array([3, 4, 5])):
        batch = rows.batch(places, places)
        randomness = Randomness(0, 0, batch.example_index)
        evaluator.update(made(made.corrupt(batch, randomness), randomness), made.corrupt(batch, randomness))
    assert evaluator.loss("pairs") == pytest.approx(whole, rel=1e-5)
    assert whole == pytest.approx(step(made, groups)[0] / 6, rel=1e-4)


def test_judged_pairs_are_scored_by_their_cosines() -> None:
    judged = [TextGroup(str(n), ("a", "b"), score) for n, score in enumerate((1.0, 3.0, 5.0))]
    outputs = [{"vectors": np.array([[1.0, 0.0], [np.cos(angle), np.sin(angle)]], np.float32)} for angle in (1.5, 0.5, 0.1)]
    made = task(SIMILARITY_METRICS)
    predictions = made.predict(judged, features_of(judged), outputs)
    assert [each["similarity"] for each in predictions] == pytest.approx(np.cos([1.5, 0.5, 0.1]), abs=1e-6)
    assert made.score(judged, predictions).values["spearman"] == pytest.approx(1.0)
    assert made.failure(judged, [{"similarity": 1.0}] * 3)
    assert not made.mistakes(judged, predictions)
    assert set(made.encode(judged, TEXT, labeled=True).targets) == {"score"}, "a judged pair may be no positive"


def test_anchors_search_their_positives_among_all_texts() -> None:
    groups = [
        TextGroup("0", ("a", "b")),
        TextGroup("1", ("a", "c")),  # a second positive of the same anchor
        TextGroup("2", ("d", "e", "f")),
        TextGroup("3", ("b", "a")),  # its own text is a positive of others, and is not found
    ]
    spot = {"a": 0.0, "b": 0.1, "c": 0.4, "d": 1.0, "e": 1.3, "f": 1.1}
    outputs = [
        {"vectors": np.array([[np.cos(spot[text]), np.sin(spot[text])] for text in group.texts], np.float32)} for group in groups
    ]
    made = task()
    predictions = made.predict(groups, features_of(groups), outputs)
    by_text = {each["text"]: each for each in predictions}
    assert by_text["a"]["ranks"] == [1, 2]
    assert by_text["d"]["ranks"] == [2], "the negative is nearer"
    assert by_text["d"]["found"] == "f"
    assert by_text["b"]["ranks"] == [1]
    scores = made.score(groups, predictions).values
    assert tuple(scores) == RETRIEVAL_METRICS
    assert scores["mrr"] == pytest.approx((1 + 0.5 + 1) / 3)
    assert scores["recall_at_1"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert scores["ndcg_at_10"] == pytest.approx((1 + 1 / np.log2(3) + 1) / 3)
    assert [each["text"] for each in made.mistakes(groups, predictions)] == ["d"]


def test_a_document_with_the_id_of_the_query_is_not_found_as_in_beir() -> None:
    groups = [
        TextGroup("q", ("a query",), relevant=(("d", 1.0),)),
        TextGroup("r", ("another",), relevant=(("r", 1.0),)),  # is judged, and found
        *(TextGroup(name, (f"document {name}",)) for name in ("q", "d", "r")),
    ]
    places = (0.0, 1.0, 0.0, 0.1, 0.9)
    outputs = [{"vectors": np.array([[np.cos(place), np.sin(place)]], np.float32)} for place in places]
    found = task().predict(groups, features_of(groups), outputs)
    assert [(each["ranks"], each["found"]) for each in found] == [([1], "document d"), ([1], "document r")]


def test_vectors_that_are_all_the_same_find_nothing() -> None:
    outputs = [{"vectors": np.ones((len(group.texts), 2), np.float32)} for group in GROUPS]
    found = task().score(GROUPS, task().predict(GROUPS, features_of(GROUPS), outputs)).values
    assert found["recall_at_1"] == 0


def test_grades_decide_the_best_order() -> None:
    (value,) = (retrieval_scores([Ranking((1, 2), (1.0, 3.0))]).values["ndcg_at_10"],)
    assert value == pytest.approx((1 + 3 / np.log2(3)) / (3 + 1 / np.log2(3)))
    with pytest.raises(DataError, match="no queries"):
        retrieval_scores([])


def test_what_cannot_be_learned_from_is_refused() -> None:
    with pytest.raises(DataError, match=r"made\.csv has a single pair"):
        Contrastive.learn(Reading((TextGroup("0", ("a", "b")),) * 3, "made.csv"), ContrastiveConfig(), ())
    same = tuple(TextGroup(str(n), ("a", str(n)), 3.0) for n in range(3))
    with pytest.raises(DataError, match=r"all pairs of made\.csv have the score 3"):
        Contrastive.learn(Reading(same, "made.csv"), ContrastiveConfig(), ())
    with pytest.raises(ConfigError, match="size 64, but the vectors of this model have 32"):
        Contrastive.check_encoder(ContrastiveConfig(matryoshka=(64,)), encoder().config)
    with pytest.raises(ConfigError, match="trained alone, but there are 2 tasks"):
        supervised(encoder(), {"pairs": task(), "more": task()})
    with pytest.raises(ValueError, match="greater than 0"):
        ContrastiveConfig(temperature=0)


def test_the_baseline_compares_as_the_network() -> None:
    made = task()
    (baseline,) = made.baselines()
    predictions = baseline.predict(GROUPS, GROUPS)
    assert predictions is not None
    assert set(made.score(GROUPS, predictions).values) == set(RETRIEVAL_METRICS)
    judged = [TextGroup(str(n), group.texts[:2], float(n)) for n, group in enumerate(GROUPS)]
    (first, *_) = baseline.predict(GROUPS, [TextGroup("x", ("the model", "the model"), 5.0), *judged]) or []
    assert first["similarity"] == pytest.approx(1.0)


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
        assert found.keys() == alone.keys()
        for name in alone:
            torch.testing.assert_close(found[name], alone[name], atol=2e-5, rtol=1e-4)


def test_a_split_is_evaluated_with_its_loss() -> None:
    made = supervised(encoder(), {"pairs": task()}, heldout={"pairs": Split(tuple(GROUPS), features_of(GROUPS))})
    evaluator = made.eval().evaluator()
    rows, places = made.heldout["pairs"].features, np.arange(6)
    batch = TaskRowsInOrder({"pairs": rows}).batch(places, places)
    randomness = Randomness(0, 0, batch.example_index)
    evaluator.update(made(made.corrupt(batch, randomness), randomness), made.corrupt(batch, randomness))
    found = evaluator.compute()
    assert set(found) == {"loss", *RETRIEVAL_METRICS}
    assert found["loss"] > 0
