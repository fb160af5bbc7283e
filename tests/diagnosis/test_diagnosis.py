"""What figures are called ill, and what is told."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from discern.corruption.randomness import Randomness
from discern.diagnosis.health import (
    Expectations,
    HealthMonitor,
    WordPrediction,
    diagnosable_from,
    diagnose_drift,
    diagnose_duplicates,
    diagnose_gradients,
    diagnose_loss_shares,
    diagnose_metrics,
    doubt_at_shown_words,
    embedding_gradients,
    embedding_norm,
    expectations,
    too_early,
)
from discern.objectives import objectives
from discern.objectives.base import BuildSettings, Objective, Vocabulary, WordTargets
from discern.objectives.rtd import ReplacedTokenDetection, RTDConfig
from discern.types import LossTerm, StepOutput
from tests.objectives.rtd_options import OPTIONS, build_option
from tests.support import SPECIAL, make_batch, settings

RTD = Expectations(weights=(1.0, 50.0))


def verdicts(**figures: float) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in diagnose_metrics(figures, RTD)}


def test_a_generator_that_is_too_strong_or_too_weak() -> None:
    # 0.15 of the tokens were chosen each time.
    assert verdicts(replaced_fraction=0.15 * 0.3, sampled_accuracy=0.7) == {"replaced_fraction": "low"}
    assert verdicts(replaced_fraction=0.15 * 0.5, sampled_accuracy=0.5) == {"replaced_fraction": "fine"}
    assert verdicts(replaced_fraction=0.15 * 0.99, sampled_accuracy=0.01) == {"replaced_fraction": "high"}
    assert verdicts(sampled_accuracy=1.0, replaced_fraction=0.0) == {}


def test_a_discriminator_that_answers_original_to_everything() -> None:
    (found,) = diagnose_metrics({"discriminator_recall": 0.0, "discriminator_auc": 0.501}, RTD)
    assert found.verdict == "low"
    assert "predicts 'original' everywhere (AUC 0.50; 0.5 is guessing)" in found.cause
    assert "optimizer.learning_rate" in found.knob
    assert verdicts(discriminator_recall=0.05) == {"discriminator_recall": "fine"}


@pytest.mark.parametrize(("recall", "auc", "verdict"), [(0.56, 0.51, "low"), (0.05, 0.57, "fine"), (0.1, 0.76, "fine")])
def test_a_discriminator_that_marks_tokens_at_random(recall: float, auc: float, verdict: str) -> None:
    found = diagnose_metrics({"discriminator_recall": recall, "discriminator_auc": auc}, RTD)
    assert [each.verdict for each in found] == ["fine", verdict]
    assert too_early(found[1], 99, 100).verdict == ("unknown" if verdict == "low" else "fine")
    assert ("another optimizer.learning_rate" in found[1].knob) is (verdict == "low")


def test_what_was_chosen_is_no_ailment() -> None:
    figures = {"replaced_fraction": 0.149, "sampled_accuracy": 0.001, "discriminator_recall": 0.5}
    chosen = Expectations(generator_learns=False)
    assert [finding.name for finding in diagnose_metrics(figures, chosen)] == ["discriminator_recall"]
    assert HealthMonitor(0, chosen).notes(5, figures) == []
    assert len(HealthMonitor(0, RTD).notes(5, figures)) == 1


def test_recall_has_a_band_only_where_every_token_is_judged() -> None:
    (found,) = diagnose_metrics({"discriminator_recall": 0.0}, Expectations(detects_every_token=False))
    assert (found.value, found.usual, found.verdict) == (0.0, None, "unknown")
    rtd, electric = (expectations(build(name), 100) for name in ("rtd", "electric"))
    assert (rtd.detects_every_token, rtd.weights) == (True, (1.0, 50.0))
    assert (electric.detects_every_token, electric.weights) == (False, None)


def counting(counts: dict[int, int], **model: Any) -> BuildSettings:
    """Settings of a small network on text with these token counts by id."""
    base = settings(**model)
    found = torch.zeros(base.vocabulary.size, dtype=torch.int64)
    for token, count in counts.items():
        found[token] = count
    return replace(base, vocabulary=replace(base.vocabulary, token_counts=found))


@pytest.mark.parametrize(
    ("name", "options", "sampled", "blind"),
    [
        # Four words, evenly frequent: ln 4 nats without any knowledge of the input.
        ("mlm", {"mask_token_probability": 1.0, "random_token_probability": 0.0}, None, math.log(4)),
        # 85/15: what stands in sight is right.
        ("mlm", {"mask_token_probability": 0.85, "random_token_probability": 0.0}, None, 0.85 * math.log(4)),
        ("replace-mlm", {}, 0.25, -0.25 * math.log(0.25) - 0.75 * math.log(0.75) + 0.75 * math.log(4)),
    ],
)
def test_words_are_to_be_predicted_better_than_by_their_frequencies(
    name: str, options: dict[str, Any], sampled: float | None, blind: float
) -> None:
    counts = dict.fromkeys(range(5, 9), 10) | {SPECIAL.cls: 1000, SPECIAL.sep: 1000}
    factory = objectives.load(name)
    objective = factory(factory.Config(**options), counting(counts))
    expected = expectations(objective, 100)
    figures = {} if sampled is None else {"sampled_accuracy": sampled}
    (stuck,) = diagnose_metrics({**figures, "mlm_loss": blind}, expected)
    assert (stuck.name, stuck.verdict) == ("mlm_gain", "low")
    assert stuck.value == pytest.approx(0.0, abs=1e-12)
    assert ("mask_token_probability" in stuck.knob) == (objective.config.mask_token_probability == 1)
    (learns,) = diagnose_metrics({**figures, "mlm_loss": blind - 0.5}, expected)
    assert (learns.value, learns.verdict) == (pytest.approx(0.5), "fine")
    assert len(HealthMonitor(0, expected).notes(5, {**figures, "mlm_loss": blind})) == 1


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 1.0])
def test_what_a_word_in_sight_leaves_open_by_enumeration(kept: float) -> None:
    """The joint distribution of original and seen word, written out; words that never occur may be seen as well."""
    frequencies = torch.tensor([0.6, 0.25, 0.1, 0.05, 0.0, 0.0], dtype=torch.float64)
    joint = kept * frequencies.diag() + (1 - kept) / 6 * frequencies[:, None].expand(6, 6)
    by_hand = torch.special.entr(joint).sum() - torch.special.entr(joint.sum(0)).sum()
    found = doubt_at_shown_words(frequencies, kept)
    assert found == pytest.approx(float(by_hand), abs=1e-12)
    # It is below what follows from `kept` alone, which was the bound.
    coarse = WordPrediction(WordTargets("", Vocabulary(6, SPECIAL), shown=1.0), float(torch.special.entr(frequencies).sum()))
    coarse = coarse.loss_without_context(kept)
    assert found < coarse + 1e-12
    assert (found < coarse - 0.05) is (0 < kept < 1)


def test_the_bound_of_80_10_10_is_that_entropy() -> None:
    counts = {5: 60, 6: 25, 7: 10, 8: 5}
    factory = objectives.load("mlm")
    objective = factory(factory.Config(), counting(counts))
    words = expectations(objective, 100).words
    assert words is not None
    frequencies = torch.zeros(objective.vocabulary.size, dtype=torch.float64)
    for token, count in counts.items():
        frequencies[token] = count / 100
    entropy = float(torch.special.entr(frequencies).sum())
    expected = 0.8 * entropy + 0.2 * doubt_at_shown_words(frequencies, 0.5)
    assert words.loss_without_context(0.5) == pytest.approx(expected)


def test_words_of_a_permutation_are_hidden() -> None:
    factory = objectives.load("permutation-lm")
    xlnet = counting({5: 10, 6: 10}, encoder="xlnet", embedding_size=16)
    (found,) = diagnose_metrics({"permutation_lm_loss": 0.5}, expectations(factory(factory.Config(), xlnet), 100))
    assert (found.name, found.value) == ("permutation_lm_gain", pytest.approx(math.log(2) - 0.5))
    assert "local" not in found.knob  # it has no local start


def test_no_frequencies_no_judgment_of_words() -> None:
    assert expectations(build("mlm"), 100).words is None  # of text that nobody has counted
    factory = objectives.load("mlm")
    rare = factory(factory.Config(masking="rarity"), counting({5: 10, 6: 10}))
    assert expectations(rare, 100).words is None  # it does not ask for words as often as they occur
    everything = objectives.load("all-tokens-mlm")
    assert expectations(everything(everything.Config(), counting({5: 10, 6: 10})), 100).words is None


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_the_embeddings_with_every_option(name: str) -> None:
    objective = build_option(OPTIONS[name]).train()
    tokens = make_batch([[SPECIAL.cls, *range(5, 25), SPECIAL.sep]] * 3)
    randomness = Randomness(0, 0, tokens.slot)
    output = objective(objective.corrupt(tokens, randomness), randomness)
    sent = embedding_gradients(objective, output)
    assert set(sent) <= set(output.terms)
    assert sent


def test_figures_of_other_objectives_are_left_alone() -> None:
    assert diagnose_metrics({"mlm_loss": 3.0, "mlm_accuracy": 0.2}, RTD) == []


def test_loss_shares_are_of_the_weighted_means() -> None:
    terms = {"generator": LossTerm(torch.tensor(20.0), 10, 1.0), "discriminator": LossTerm(torch.tensor(8.0), 100, 50.0)}
    generator, discriminator = diagnose_loss_shares(StepOutput(terms), RTD)
    assert diagnose_loss_shares(StepOutput(terms), Expectations())[1].usual is None  # Electric has these names too
    assert (generator.value, discriminator.value) == (pytest.approx(2 / 6), pytest.approx(4 / 6))
    assert (generator.usual, discriminator.verdict) == (None, "low")
    assert diagnose_loss_shares(StepOutput({"mlm": LossTerm(torch.tensor(1.0), 1)}), Expectations()) == []


def test_the_surrogate_of_adversarial_training_has_no_share_and_its_gradient_is_the_generators() -> None:
    terms = {
        "adversarial": LossTerm(torch.tensor(80.0), 10, 1.0),
        "baseline": LossTerm(torch.tensor(10.0), 10, 1.0),
        "discriminator": LossTerm(torch.tensor(8.0), 100, 50.0),
    }
    shares = {finding.name: finding.value for finding in diagnose_loss_shares(StepOutput(terms), Expectations())}
    assert shares == {"baseline_loss_share": pytest.approx(1 / 5), "discriminator_loss_share": pytest.approx(4 / 5)}
    gradient = torch.tensor([[1.0, 2.0]])
    assert diagnose_gradients({"adversarial": gradient, "discriminator": -gradient})[0].value == pytest.approx(-1.0)


def build(name: str, **options: Any) -> Objective:
    factory = objectives.load(name)
    objective: Objective = factory(factory.Config(**options), settings())
    objective.initialize(0)
    return objective


def rtd(tying: str) -> tuple[Objective, StepOutput]:
    objective = ReplacedTokenDetection(RTDConfig(tying=tying, generator_size=1.0), settings())
    objective.initialize(0)
    randomness = Randomness(0, 0, torch.arange(2))
    batch = objective.eval().corrupt(make_batch([[2, *range(5, 25), 3], [2, *range(20, 40), 3]]), randomness)
    return objective, objective(batch, randomness)


def test_gradients_are_those_of_each_term_alone() -> None:
    objective, output = rtd("embeddings")
    found = embedding_gradients(objective, output)
    assert set(found) == {"generator", "discriminator"}
    whole = sum(term.total * (term.weight / term.count) for term in output.terms.values())
    assert isinstance(whole, torch.Tensor)
    whole.backward()
    table = objective.networks()["generator"].encoder.embeddings.weights
    torch.testing.assert_close(found["generator"] + found["discriminator"], table.grad)
    cosine, ratio = diagnose_gradients(found)
    assert cosine.value is not None
    assert -1 <= cosine.value <= 1
    assert ratio.value == pytest.approx(float(found["discriminator"].norm() / found["generator"].norm()))


def test_without_shared_gradient_there_is_no_conflict() -> None:
    objective, output = rtd("gradient-disentangled")
    found = embedding_gradients(objective, output)
    assert set(found) == {"generator"}
    (cosine,) = diagnose_gradients(found)
    assert (cosine.value, cosine.verdict) == (None, "unknown")
    assert "only generator" in cosine.cause


def test_cosine_of_gradients_that_pull_apart() -> None:
    gradient = torch.tensor([[1.0, 2.0]])
    apart, _ = diagnose_gradients({"generator": gradient, "discriminator": -3 * gradient})
    assert (apart.value, apart.verdict) == (pytest.approx(-1.0), "low")
    assert "gradient-disentangled" in apart.knob
    together = {"generator": gradient, "discriminator": gradient, "sentence": gradient}
    assert diagnose_gradients(together)[0].value == pytest.approx(1.0)


def test_drift_and_duplicates() -> None:
    assert diagnose_drift(2.0, 1.0).value == pytest.approx(2.0)
    assert diagnose_drift(4.0, 1.0).verdict == "high"
    objective = build("mlm")
    assert embedding_norm(objective) == pytest.approx(
        float(objective.networks()["encoder"].encoder.embeddings.weights.norm(dim=1).mean())
    )
    assert [finding.verdict for finding in diagnose_duplicates(100, 1)] == ["fine"]
    assert [finding.verdict for finding in diagnose_duplicates(100, 20)] == ["high"]
    assert diagnose_duplicates(0, 0) == []


def test_the_watchman_waits_for_the_warm_up_and_says_each_thing_once() -> None:
    watchman = HealthMonitor(100, RTD)
    ill = {"discriminator_recall": 0.0, "discriminator_auc": 0.5}
    assert watchman.notes(50, ill) == []
    (note,) = watchman.notes(100, ill)
    assert note.startswith("warning: discriminator_recall 0.0000 is low: ")
    assert "; try a lower optimizer.learning_rate" in note
    assert watchman.notes(200, ill) == []
    assert watchman.notes(300, {"mlm_loss": 2.0}) == []


def test_the_watchman_passes_over_a_discriminator_that_has_not_begun() -> None:
    ill = {"discriminator_recall": 0.0, "discriminator_auc": 0.5}
    two_stage = expectations(build("rtd", algorithm="two-stage", two_stage_steps=0.5, copy_weights=False), 1000)
    assert two_stage.discriminator_from == 500
    watchman = HealthMonitor(100, two_stage)
    assert watchman.notes(599, ill) == []
    assert len(watchman.notes(600, ill)) == 1


def test_the_watchman_looks_at_loss_shares_and_at_the_embeddings() -> None:
    watchman = HealthMonitor(0, RTD, start_norm=1.0)
    assert watchman.notes(1, {"generator_loss": 5.0, "discriminator_loss": 0.4}, norm=1.5) == []
    (share,) = watchman.notes(2, {"generator_loss": 5.0, "discriminator_loss": 0.1}, norm=1.5)
    assert share.startswith("warning: discriminator_loss_share 0.5000 is low: ")
    (drift,) = watchman.notes(3, {}, norm=3.5)
    assert drift.startswith("warning: embedding_norm_drift 3.5000 is high: ")
    assert HealthMonitor(0, RTD).notes(3, {}, norm=3.5) == []


ON = {"model.initialization": "local", "objective.tying": "gradient-disentangled", "objective.discriminator_head": "bilinear"}


def test_nothing_is_advised_that_is_on_already() -> None:
    figures = {"discriminator_recall": 0.0, "replaced_fraction": 0.15, "sampled_accuracy": 0.0}
    for given, there in ((ON, False), (dict.fromkeys(ON, "other"), True), ({}, True)):
        found = diagnose_metrics(figures, replace(RTD, settings=given))
        assert {finding.verdict for finding in found} == {"low", "high"}
        advice = " ".join(finding.knob for finding in [*found, diagnose_drift(5.0, 1.0, given)])
        assert ("local" in advice) == ("bilinear" in advice) == there
        assert "a lower optimizer.learning_rate" in advice
    (found, _) = diagnose_metrics(figures, replace(RTD, settings={"objective.generator_size": 1.0}))
    assert found.knob == "longer training"  # no larger generator, and an objective without these settings


def test_the_missing_one_of_several_settings_is_advised_alone() -> None:
    settings = ON | {"objective.discriminator_head": "linear"}
    (found,) = diagnose_metrics({"discriminator_recall": 0.0}, replace(RTD, settings=settings))
    expected = "for small networks objective.discriminator_head = 'bilinear' (as preset cpu-small)"
    assert found.knob == f"a lower optimizer.learning_rate; {expected}"


def test_it_is_too_early_to_tell_before_a_run_has_settled() -> None:
    assert diagnosable_from(warmup_steps=500, max_steps=22_000) == 1000
    assert diagnosable_from(warmup_steps=10_000, max_steps=1_000_000) == 10_000
    assert diagnosable_from(warmup_steps=5, max_steps=100) == 10
    (recall,) = diagnose_metrics({"discriminator_recall": 0.0}, RTD)
    assert diagnosable_from(warmup_steps=10_000, max_steps=231) == 231  # ended by its time budget
    early = too_early(recall, 209, 1000)
    assert (early.verdict, early.knob, early.value) == ("unknown", "", 0.0)
    assert early.cause == "too early to tell at step 209; wait until step 1,000"
    assert too_early(recall, 1000, 1000) is recall
    (fine,) = diagnose_metrics({"discriminator_recall": 0.5}, RTD)
    (duplicates,) = diagnose_duplicates(10, 9)
    assert too_early(fine, 1, 1000) is fine
    assert too_early(duplicates, 1, 1000) is duplicates
