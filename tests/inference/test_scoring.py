"""Scores of texts, by tiny networks against loops and formulas by hand, and of the lines of files."""

from __future__ import annotations

import gzip
import io
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from discern.corruption.masking import Sampling
from discern.errors import ConfigError, DataError, NumericsError
from discern.inference import PREFERRED, scorers, windows
from discern.inference.scoring.scorers import (
    PERPLEXITIES,
    CorpusScore,
    Inversion,
    Score,
    ScoringModel,
    inverted,
    load_scorer,
    score_lines,
    supported,
)
from discern.inference.windows import Window
from discern.model_files.export import export
from discern.model_files.huggingface import SETTINGS_NAME
from discern.models.base import Network
from discern.models.two_stream import Factorization
from discern.models.xlnet.encoder import XLNetEncoder
from discern.objectives.base import Objective
from discern.progress import Silent
from discern.storage.checksums import remove_recorded
from tests.inference.small_scorers import SPECIAL, TEXTS, TOKENIZER, ids_of, make_objective, make_scorer
from tests.small.run import make_run

EVERY = [
    ("electric", "electric"),
    ("electric", "two-tower"),
    ("rtd", "rtd"),
    ("rtd", "pll"),
    ("rtd", "pll-word-l2r"),
    ("rtd", "inversion"),
    ("permutation-lm", "permutation-lm"),
]
LONG = "the chef cooked the meal and the guests ate purple elephants, " * 3


def objective_of(name: str) -> Objective:
    return make_objective(name, encoder="xlnet" if name == "permutation-lm" else "bert")


@pytest.mark.parametrize(("objective", "name"), EVERY)
def test_scores_do_not_depend_on_their_company(objective: str, name: str) -> None:
    scorer = make_scorer(objective_of(objective), name, max_length=20, chosen_share=0.15)
    texts = [*TEXTS, LONG, "", "the CHEF  cooked the meal."]
    together = scorer.score(texts)
    assert [score.text for score in together] == texts
    for text, score in zip(texts, together, strict=True):
        (alone,) = scorer.score([text])
        assert score.tokens == alone.tokens
        assert score.token_scores == pytest.approx(alone.token_scores, abs=1e-5)
        assert score.total == math.fsum(score.token_scores)
    assert together[0].total == together[-1].total, "the same tokens have the very same score"
    assert (together[-2].total, together[-2].tokens) == (0.0, [])


def test_every_registered_scorer_is_tried_here() -> None:
    assert {name for _, name in EVERY} == set(scorers.names())
    assert {*PREFERRED, *PERPLEXITIES} <= set(scorers.names())
    assert [name for name in scorers.names() if not scorers.load(name).reads_ahead] == ["permutation-lm"]


def test_a_score_that_is_not_finite_is_an_error() -> None:
    objective = make_objective("electric")
    objective.networks()["discriminator"].head.output.bias.fill_(math.nan)
    with pytest.raises(NumericsError, match="the outputs of the network are not finite"):
        make_scorer(objective, "electric").score(["a meal"])


# Pseudo-likelihoods


def by_hand(network: Network, text: str, last: Callable[[list[str], int], int], temperature: float = 1.0) -> list[float]:
    """Log-probability of each token, masked together with what follows it up to `last(tokens, place)`."""
    ids, found = ids_of(text), []
    tokens = [TOKENIZER.id_to_token(token) for token in ids]
    for place, token in enumerate(ids):
        masked = [*ids]
        masked[place : last(tokens, place) + 1] = [SPECIAL.mask] * (last(tokens, place) + 1 - place)
        hidden = network.encoder(torch.tensor([[SPECIAL.cls, *masked, SPECIAL.sep]]))
        logits = network.head(hidden)[0, place + 1] / temperature
        found.append(float(logits.log_softmax(0)[token]))
    return found


def end_of_word(tokens: list[str], place: int) -> int:
    while place + 1 < len(tokens) and tokens[place + 1].startswith("##"):
        place += 1
    return place


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("objective", "network"), [("mlm", "encoder"), ("rtd", "generator")])
def test_each_token_is_masked_in_turn_alone_or_with_the_rest_of_its_word(objective: str, network: str, text: str) -> None:
    built = make_objective(objective)
    for name, last in (("pll", lambda _, place: place), ("pll-word-l2r", end_of_word)):
        (score,) = make_scorer(built, name).score([text])
        assert score.token_scores == pytest.approx(by_hand(built.networks()[network], text, last), abs=1e-4)


@pytest.mark.parametrize("text", TEXTS)
def test_two_towers_tell_every_token_in_one_pass(text: str) -> None:
    built = make_objective("electric")
    (score,) = make_scorer(built, "two-tower").score([text])
    ids = ids_of(text)
    logits = built.networks()["generator"].token_logits(torch.tensor([[SPECIAL.cls, *ids, SPECIAL.sep]]))[0, 1:-1]
    expected = logits.log_softmax(-1)[torch.arange(len(ids)), ids]
    assert score.token_scores == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_pseudo_perplexity_by_hand() -> None:
    """Three texts of 2, 1 and 0 tokens with probabilities 1/2, 1/8 and 1/4: exp of the mean over tokens, not over texts."""
    scorer, together = make_scorer(make_objective("mlm"), "pll"), CorpusScore()
    assert together.values(scorer)["pseudo_perplexity"] == 1.0
    scores = [[math.log(1 / 2), math.log(1 / 8)], [math.log(1 / 4)], []]
    texts = ["Ab c", "é\u0301", ""]  # 4 characters with the space, and 2: the accent on an accent is one of its own
    together.add([Score(text, sum(each), ["x"] * len(each), [], each) for text, each in zip(texts, scores, strict=True)])
    values = together.values(scorer)
    assert (values["pseudo_perplexity"], values["num_tokens"], values["num_characters"]) == (pytest.approx(64 ** (1 / 3)), 3, 6)
    assert values["score_per_character"] == pytest.approx(-math.log(64) / 6)
    together.add([Score("", -1e6, ["x"], [], [-1e6])])
    assert together.values(scorer)["pseudo_perplexity"] == math.inf


# From left to right


def window_of(ids: list[int]) -> Window:
    return Window(tuple(ids), tuple(range(len(ids))))


@pytest.mark.parametrize("text", TEXTS)
def test_each_token_is_told_from_those_before_it(text: str) -> None:
    """By hand: one prefix at a time, in which the last position alone is predicted."""
    built = make_objective("permutation-lm", encoder="xlnet")
    network, ids = built.networks()["encoder"], ids_of(text)
    assert isinstance(network.encoder, XLNetEncoder)
    expected = []
    for count in range(1, len(ids) + 1):
        visible = torch.ones(1, count, count, dtype=torch.bool).tril(-1)
        order = Factorization(visible, torch.tensor([[count - 1]]))
        state = network.encoder.two_streams(torch.tensor([ids[:count]]), order).query[0, 0]
        expected.append(float(network.head(state).log_softmax(0)[ids[count - 1]]))
    (score,) = make_scorer(built, "permutation-lm").score([text])
    assert score.token_scores == pytest.approx(expected, abs=1e-4)


def test_an_xlnet_is_used_as_it_was_trained() -> None:
    """As a masked language model its query stream has learned nothing."""
    permuted, masked = (make_objective(name, encoder="xlnet") for name in ("permutation-lm", "mlm"))
    for built, is_permuted, fitting in ((permuted, True, {"permutation-lm"}), (masked, False, {"pll", "pll-word-l2r"})):
        model = ScoringModel(built.networks(), SPECIAL, is_permuted=is_permuted)
        assert set(supported(model)) == fitting
    (score,) = make_scorer(masked, "pll").score(["the meal"])
    ids = ids_of("the meal")
    # Framed as its rows are: [CLS] comes last, in a segment of its own.
    row = torch.tensor([[SPECIAL.mask, *ids[1:], SPECIAL.sep, SPECIAL.cls]])
    states = masked.networks()["encoder"].encoder(row, None, torch.tensor([[*[0] * (len(ids) + 1), 2]]))
    first = masked.networks()["encoder"].head(states)[0, 0].log_softmax(0)[ids[0]]
    assert score.token_scores[0] == pytest.approx(float(first), abs=1e-4)


# Discriminators and energy models


@pytest.mark.parametrize(("objective", "name"), [("electric", "electric"), ("rtd", "rtd")])
@pytest.mark.parametrize("text", TEXTS)
def test_scores_are_the_numbers_of_the_head_negated(objective: str, name: str, text: str) -> None:
    built = make_objective(objective)
    (score,) = make_scorer(built, name).score([text])
    network = built.networks()["discriminator"]
    numbers = network.head(network.encoder(torch.tensor([[SPECIAL.cls, *ids_of(text), SPECIAL.sep]])))[0]
    assert score.token_scores == pytest.approx((-numbers[1:-1]).tolist(), abs=1e-5)


@pytest.mark.parametrize("share", [0.01, 0.15, 0.25, 0.9])
def test_the_best_discriminator_gives_the_probabilities_of_the_text(share: float) -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)  # of a word in the text
    q = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)  # of a word by the generator
    original, replaced = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for true in range(4):
        original[true] += p[true] * (1 - share)  # not chosen
        for drawn in range(4):
            (original if drawn == true else replaced)[drawn] += p[true] * share * q[drawn]
    log_odds = (original / replaced).log()
    torch.testing.assert_close(inverted(log_odds, q.log(), share).exp(), p)


@pytest.mark.parametrize("generator", ["mlm", "two-tower"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_inversion_combines_odds_and_generator_at_its_temperature(generator: str, temperature: float) -> None:
    built = make_objective("rtd", generator=generator, temperature=temperature)
    scorer = make_scorer(built, "inversion", chosen_share=0.25, sampling=built.config.sampling_at(0))
    likelihood = make_scorer(built, "pll" if generator == "mlm" else "two-tower")
    likelihood.method.temperature = temperature
    for score, odd, log in zip(*(each.score(TEXTS) for each in (scorer, make_scorer(built, "rtd"), likelihood)), strict=True):
        for found, log_odds, log_q in zip(score.token_scores, odd.token_scores, log.token_scores, strict=True):
            d, q = 1 / (1 + math.exp(-log_odds)), math.exp(log_q)
            assert math.exp(found) == pytest.approx(0.25 * d * q / (0.25 * q + 0.75 * (1 - d)), rel=1e-4)


def test_what_the_formula_does_not_hold_for_is_refused() -> None:
    networks = make_objective("rtd").networks()
    assert "inversion" in supported(ScoringModel(networks, SPECIAL, 0.15))
    for model in (
        ScoringModel(networks, SPECIAL),  # not trained on every token, or not on uniformly chosen ones
        ScoringModel(networks, SPECIAL, 0.15, sampling=Sampling(top_p=0.9)),
        ScoringModel(networks, SPECIAL, 0.15, sampling=Sampling(disallow_original=True)),
        ScoringModel({"discriminator": networks["discriminator"]}, SPECIAL, 0.15),
    ):
        assert "inversion" not in supported(model)


# Model folders and files


SENTENCES = ["The chef cooked the meal.", "cats", "purple elephants, and naïve guests"]
NAMES = ("rtd", "electric", "mlm", "replace-mlm", "all-tokens-mlm", "rtd-masked-only")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each objective, and exports of some."""
    folder = tmp_path_factory.mktemp("score")
    for name in NAMES:
        make_run(folder / name, overrides=[f"objective.name={name}", "data.sequence_length=16"])
    for name, out, network, every in [
        ("rtd", "rtd-both", None, True),
        ("rtd", "rtd-generator", "generator", False),
        ("electric", "electric-alone", None, False),
        ("mlm", "mlm-export", None, False),
        ("replace-mlm", "replace-mlm-alone", None, False),
    ]:
        export(folder / name, out=folder / out, network=network, all_networks=every, progress=Silent(), warn=pytest.fail)
    return folder


def totals(folder: Path, name: str | None = None) -> list[float]:
    return [score.total for score in load_scorer(folder, name, "cpu", warn=pytest.fail).score(SENTENCES)]


@pytest.mark.parametrize(
    ("folder", "scorer"),
    [
        ("rtd", "rtd"),
        ("rtd-masked-only", "rtd"),
        ("electric", "electric"),
        ("mlm", "pll"),
        ("replace-mlm", "pll"),
        ("all-tokens-mlm", "pll"),
        ("rtd-generator", "pll"),
        ("electric-alone", "electric"),
    ],
)
def test_the_model_chooses_the_scorer(runs: Path, folder: str, scorer: str) -> None:
    assert load_scorer(runs / folder, warn=pytest.fail).name == scorer


@pytest.mark.parametrize(
    ("export_", "run", "scorer"),
    [
        ("rtd-both", "rtd", "inversion"),
        ("rtd-generator", "rtd", "pll-word-l2r"),
        ("electric-alone", "electric", "electric"),
        ("mlm-export", "mlm", "pll"),
    ],
)
def test_an_export_scores_as_the_run_does(runs: Path, export_: str, run: str, scorer: str) -> None:
    assert totals(runs / export_, scorer) == pytest.approx(totals(runs / run, scorer), abs=1e-4)


def test_the_generator_and_not_the_encoder_reads_masks_where_the_encoder_never_saw_one(runs: Path) -> None:
    scorer = load_scorer(runs / "replace-mlm", "pll", "cpu", warn=pytest.fail)
    objective = make_run(runs / "again", overrides=["objective.name=replace-mlm", "data.sequence_length=16"])
    generator = objective.networks()["generator"]
    ids = scorer.tokenizer.encode("the", add_special_tokens=False).ids
    with torch.no_grad():
        logits = generator.head(generator.encoder(torch.tensor([[2, 4, 3]])))[0, 1]
    assert scorer.score(["the"])[0].total == pytest.approx(float(logits.log_softmax(0)[ids[0]]), abs=1e-4)
    with pytest.raises(ConfigError, match="no scorer can use it"):
        load_scorer(runs / "replace-mlm-alone", warn=pytest.fail)


def test_an_xlnet_is_scored_from_left_to_right(tmp_path: Path) -> None:
    settings = ["objective.name=permutation-lm", "model.encoder=xlnet", "model.embedding_size=32", "data.packing=two-part"]
    make_run(tmp_path / "run", overrides=[*settings, "model.hidden_size=32", "data.sequence_length=16"])
    export(tmp_path / "run", out=tmp_path / "export", progress=Silent(), warn=pytest.fail)
    assert load_scorer(tmp_path / "export", warn=pytest.fail).name == "permutation-lm"
    remove_recorded([tmp_path / "export" / SETTINGS_NAME])
    assert totals(tmp_path / "export") == pytest.approx(totals(tmp_path / "run"), abs=1e-4)


def test_the_share_of_chosen_tokens_is_assumed_aloud(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "rtd-both", tmp_path / "copy")
    remove_recorded([tmp_path / "copy" / SETTINGS_NAME])
    told: list[str] = []
    load_scorer(tmp_path / "copy", "inversion", "cpu", warn=told.append).score(SENTENCES)
    # 0.15 with replacement: of 510 words 77 draws, of which 71.5 differ.
    assert ["0.14, that of the released ELECTRAs of this width, is assumed" in message for message in told] == [True]
    totals(tmp_path / "copy", "rtd")


@pytest.mark.parametrize(
    ("overrides", "share"),
    [
        ([], 2 / 14),  # 0.15 of 14 words is 2.1
        (["objective.mask_probability=0.5"], 7 / 14),
        (["objective.mask_probability=0.5", "objective.sentence_contrastive_weight=1.0"], 0.8 * 7 / 14),
        (["objective.masking=with-replacement"], 1 - (13 / 14) ** 2),
    ],
)
def test_the_inversion_knows_which_share_was_chosen(tmp_path: Path, overrides: list[str], share: float) -> None:
    make_run(tmp_path / "run", overrides=["objective.name=rtd", "data.sequence_length=16", *overrides])
    method = load_scorer(tmp_path / "run", "inversion", warn=pytest.fail).method
    assert isinstance(method, Inversion)
    assert method.share == pytest.approx(share)


@pytest.mark.parametrize(
    ("folder", "scorer", "message", "hint"),
    [
        ("electric", "pll", "scorer 'pll' needs a masked language model", "--scorer electric or two-tower"),
        ("rtd", "electric", "scorer 'electric' needs an energy model", "--scorer inversion or pll or pll-word-l2r or rtd"),
        ("rtd-masked-only", "inversion", "trained on every token", "--scorer pll or pll-word-l2r or rtd"),
    ],
)
def test_a_scorer_that_the_model_cannot_serve_is_refused(runs: Path, folder: str, scorer: str, message: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_scorer(runs / folder, scorer, warn=pytest.fail)
    assert caught.value.hint is not None
    assert hint in caught.value.hint


def lines_of(runs: Path, source: Path) -> list[Score]:
    scorer = load_scorer(runs / "electric", device="cpu", warn=pytest.fail)
    return [score for scores in score_lines(scorer, source, Silent(), pytest.fail) for score in scores]


def test_a_file_is_scored_line_by_line_in_order(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_TEXTS", 2)
    content = "".join(f"{text}\r\n" for text in SENTENCES).encode()
    (tmp_path / "plain.txt").write_bytes(content)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(content))
    expected = totals(runs / "electric")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    for source in (tmp_path / "plain.txt", tmp_path / "packed.gz", Path("-")):
        found = lines_of(runs, source)
        assert [score.text for score in found] == SENTENCES
        assert [score.total for score in found] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("line", ["", "  \t", "\u200b"])
def test_a_line_with_nothing_to_score_is_named(runs: Path, tmp_path: Path, line: str) -> None:
    (tmp_path / "a").write_text(f"the chef\ncats\n{line}\nthe meal\n")
    blocks = score_lines(load_scorer(runs / "electric", device="cpu", warn=pytest.fail), tmp_path / "a", Silent(), pytest.fail)
    assert [score.text for score in next(blocks)] == ["the chef", "cats"]
    with pytest.raises(DataError, match="a:3 is empty, or contains nothing that the tokenizer keeps"):
        next(blocks)


def test_empty_lines_at_the_end_are_passed_over(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("the chef\ncats\n\n \n\n")
    assert [score.text for score in lines_of(runs, tmp_path / "a")] == ["the chef", "cats"]
    (tmp_path / "a").write_text("\n\n")
    with pytest.raises(DataError, match="has no lines"):
        lines_of(runs, tmp_path / "a")
