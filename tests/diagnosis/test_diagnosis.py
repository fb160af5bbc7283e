"""What figures are called unusual, and what is told."""

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
    diagnosable_from,
    diagnose_drift,
    diagnose_duplicates,
    diagnose_gradients,
    diagnose_metrics,
    doubt_at_shown_words,
    expectations,
    too_early,
    usefulness,
)
from discern.objectives import objectives
from discern.objectives.base import BuildSettings, Objective
from discern.types import LossTerm, StepOutput
from tests.objectives.rtd_options import OPTIONS, build_option
from tests.support import SPECIAL, make_batch, settings

RTD = Expectations(weights=(1.0, 50.0))
CHOSEN = Expectations(generator_learns=False)
AT_CHOSEN_POSITIONS = Expectations(detects_every_token=False)
ILL = {"discriminator_recall": 0.0, "discriminator_auc": 0.501}


def build(name: str, counts: dict[int, int] | None = None, model: dict[str, Any] | None = None, **options: Any) -> Objective:
    """An objective with a small network, on text with these token counts by id."""
    base: BuildSettings = settings(**(model or {}))
    if counts is not None:
        token_counts = torch.zeros(base.vocabulary.size, dtype=torch.int64)
        for token, count in counts.items():
            token_counts[token] = count
        base = replace(base, vocabulary=replace(base.vocabulary, token_counts=token_counts))
    factory = objectives.load(name)
    objective: Objective = factory(factory.Config(**options), base)
    objective.initialize(0)
    return objective


@pytest.mark.parametrize(
    ("metrics", "expected", "verdicts"),
    [
        # 0.15 of the tokens were chosen each time.
        ({"replaced_fraction": 0.15 * 0.3, "sampled_accuracy": 0.7}, RTD, {"replaced_fraction": "low"}),
        ({"replaced_fraction": 0.15 * 0.5, "sampled_accuracy": 0.5}, RTD, {"replaced_fraction": "fine"}),
        ({"replaced_fraction": 0.15 * 0.99, "sampled_accuracy": 0.01}, RTD, {"replaced_fraction": "high"}),
        ({"replaced_fraction": 0.149, "sampled_accuracy": 0.001}, CHOSEN, {}),
        (ILL, RTD, {"discriminator_recall": "low"}),
        ({"discriminator_recall": 0.0}, AT_CHOSEN_POSITIONS, {}),
        # Of the weighted losses 2 and 4
        ({"generator_loss": 2.0, "discriminator_loss": 0.08}, RTD, {"discriminator_loss_share": "low"}),
        ({"generator_loss": 2.0, "discriminator_loss": 0.08}, Expectations(), {}),
        (
            {"discriminator_recall": 0.56, "discriminator_auc": 0.51},
            RTD,
            {"discriminator_recall": "fine", "discriminator_auc": "low"},
        ),
        (
            {"discriminator_recall": 0.1, "discriminator_auc": 0.76},
            RTD,
            {"discriminator_recall": "fine", "discriminator_auc": "fine"},
        ),
        # Better than guessing, and not yet useful
        (
            {"discriminator_recall": 0.05, "discriminator_auc": 0.63},
            RTD,
            {"discriminator_recall": "fine", "discriminator_auc": "unknown"},
        ),
    ],
)
def test_verdicts(metrics: dict[str, float], expected: Expectations, verdicts: dict[str, str]) -> None:
    assert {finding.name: finding.verdict for finding in diagnose_metrics(metrics, expected)} == verdicts


def test_a_low_auc_is_not_praised() -> None:
    assert usefulness(0.63).startswith("AUC 0.63 is better than guessing, which is 0.5, but not yet useful")
    assert "not yet useful" not in usefulness(0.76)


def test_recall_has_a_range_only_where_every_token_is_classified() -> None:
    rtd, electric = (expectations(build(name), 100, {}) for name in ("rtd", "electric"))
    assert (rtd.detects_every_token, rtd.weights) == (True, (1.0, 50.0))
    assert (electric.detects_every_token, electric.weights) == (False, None)


EVEN = dict.fromkeys(range(5, 9), 10) | {SPECIAL.cls: 1000, SPECIAL.sep: 1000}
FREQUENCIES = torch.zeros(settings().vocabulary.size, dtype=torch.float64).index_fill(0, torch.arange(5, 9), 0.25)
XLNET = {"encoder": "xlnet", "embedding_size": 16}


def entropy(*shares: float) -> float:
    return -sum(share * math.log(share) for share in shares)


@pytest.mark.parametrize(
    ("objective", "sampled", "blind"),
    [
        # Four words, evenly frequent: ln 4 nats without any knowledge of the input.
        (build("mlm", EVEN, mask_token_probability=1.0, random_token_probability=0.0), None, math.log(4)),
        # 85/15: the visible words are right.
        (build("mlm", EVEN, mask_token_probability=0.85, random_token_probability=0.0), None, 0.85 * math.log(4)),
        # 80/10/10: of the visible words, half are right.
        (build("mlm", EVEN), None, 0.8 * math.log(4) + 0.2 * doubt_at_shown_words(FREQUENCIES, 0.5)),
        (build("replace-mlm", EVEN), 0.25, entropy(0.25, 0.75) + 0.75 * math.log(4)),
        (build("permutation-lm", EVEN, XLNET), None, math.log(4)),
    ],
)
def test_words_are_to_be_predicted_better_than_by_their_frequencies(
    objective: Objective, sampled: float | None, blind: float
) -> None:
    expected = expectations(objective, 100, {})
    assert expected.words is not None
    metrics = {} if sampled is None else {"sampled_accuracy": sampled}
    (stuck,) = diagnose_metrics({**metrics, expected.words.metric: blind}, expected)
    assert stuck.name == expected.words.metric.replace("loss", "gain")
    assert (stuck.value, stuck.verdict) == (pytest.approx(0.0, abs=1e-12), "low")
    assert ("local" in stuck.knob) == (stuck.name != "permutation_lm_gain"), "XLNet has no local initialization"
    (learns,) = diagnose_metrics({**metrics, expected.words.metric: blind - 0.5}, expected)
    assert (learns.value, learns.verdict) == (pytest.approx(0.5), "fine")


@pytest.mark.parametrize("correct", [0.0, 0.1, 0.5, 1.0])
def test_what_a_visible_word_leaves_open_by_enumeration(correct: float) -> None:
    """The joint distribution of original and visible word, written out; words that never occur may be visible as well."""
    frequencies = torch.tensor([0.6, 0.25, 0.1, 0.05, 0.0, 0.0], dtype=torch.float64)
    joint = correct * frequencies.diag() + (1 - correct) / 6 * frequencies[:, None].expand(6, 6)
    by_hand = torch.special.entr(joint).sum() - torch.special.entr(joint.sum(0)).sum()
    assert doubt_at_shown_words(frequencies, correct) == pytest.approx(float(by_hand), abs=1e-12)


def test_words_are_not_judged_without_their_frequencies() -> None:
    for objective in (build("mlm"), build("mlm", EVEN, masking="rarity"), build("all-tokens-mlm", EVEN)):
        assert expectations(objective, 100, {}).words is None


def losses_of(objective: Objective) -> StepOutput:
    """The losses of a batch."""
    tokens = make_batch([[SPECIAL.cls, *range(5, 25), SPECIAL.sep]] * 3)
    randomness = Randomness(0, 0, tokens.slot)
    return objective(objective.corrupt(tokens, randomness), randomness)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_the_embeddings_with_every_option(name: str) -> None:
    objective = build_option(OPTIONS[name]).train()
    assert -1 <= (diagnose_gradients(objective, losses_of(objective)).value or 0.0) <= 1


def test_networks_with_embeddings_of_their_own_are_in_no_conflict() -> None:
    objective = build("rtd", tying="gradient-disentangled", generator_size=1.0).eval()
    finding = diagnose_gradients(objective, losses_of(objective))
    assert (finding.value, finding.verdict) == (None, "unknown")


@pytest.mark.parametrize("generator", ["generator", "adversarial"])
def test_networks_that_pull_the_embeddings_apart(generator: str) -> None:
    objective = build("rtd")
    loss = objective.networks()["generator"].encoder.embeddings.weights.sum()
    terms = {generator: LossTerm(loss, 10), "discriminator": LossTerm(-3 * loss, 100, 50.0)}
    finding = diagnose_gradients(objective, StepOutput(terms))
    assert (finding.value, finding.verdict) == (pytest.approx(-1.0), "low")


def test_drift_and_duplicates() -> None:
    assert diagnose_drift(2.0, 1.0, {}).value == pytest.approx(2.0)
    assert diagnose_drift(4.0, 1.0, {}).verdict == "high"
    assert [diagnose_duplicates(100, count)[0].verdict for count in (1, 20)] == ["fine", "high"]
    assert diagnose_duplicates(0, 0) == []


def test_the_monitor_waits_for_the_warm_up_and_says_each_thing_once() -> None:
    monitor = HealthMonitor(100, RTD, start_norm=1.0)
    losses = {"generator_loss": 5.0, "discriminator_loss": 0.1}
    assert monitor.notes(50, ILL | losses, norm=3.5) == []
    recall, share, drift = monitor.notes(100, ILL | losses, norm=3.5)
    assert recall.startswith("warning: discriminator_recall 0.0000 is low: ")
    assert "; try a lower optimizer.learning_rate" in recall
    assert share.startswith("warning: discriminator_loss_share 0.5000 is low: ")
    assert drift.startswith("warning: embedding_norm_drift 3.5000 is high: ")
    assert monitor.notes(200, ILL | losses, norm=3.5) == []


def test_the_monitor_passes_over_a_discriminator_that_has_not_begun() -> None:
    two_stage = expectations(build("rtd", algorithm="two-stage", two_stage_steps=0.5, copy_weights=False), 1000, {})
    assert two_stage.discriminator_from == 500
    monitor = HealthMonitor(100, two_stage)
    assert [len(monitor.notes(step, ILL)) for step in (599, 600)] == [0, 1]


ON = {"model.initialization": "local", "objective.tying": "gradient-disentangled", "objective.discriminator_head": "bilinear"}
HEAD = "for small networks objective.discriminator_head = 'bilinear' (as preset cpu-small)"


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (ON, "a lower optimizer.learning_rate"),
        (ON | {"objective.discriminator_head": "linear"}, f"a lower optimizer.learning_rate; {HEAD}"),
        ({"objective.generator_size": 1.0}, "a lower optimizer.learning_rate"),  # an objective without these settings
    ],
)
def test_nothing_is_advised_that_is_set_already(given: dict[str, Any], advice: str) -> None:
    (recall,) = diagnose_metrics({"discriminator_recall": 0.0}, replace(RTD, settings=given))
    assert recall.knob == advice


def test_it_is_too_early_to_tell_before_a_run_has_settled() -> None:
    assert diagnosable_from(warmup_steps=500, max_steps=22_000) == 1000
    assert diagnosable_from(warmup_steps=10_000, max_steps=1_000_000) == 10_000
    assert diagnosable_from(warmup_steps=10_000, max_steps=231) == 231  # ended by its time budget
    (recall,) = diagnose_metrics({"discriminator_recall": 0.0}, RTD)
    early = too_early(recall, 209, 1000)
    assert (early.verdict, early.knob, early.value, early.early) == ("unknown", "", 0.0, True)
    assert early.cause == "too early to tell at step 209; wait until step 1,000"
    assert too_early(recall, 1000, 1000) is recall
    (duplicates,) = diagnose_duplicates(10, 9)
    assert too_early(duplicates, 1, 1000) is duplicates
