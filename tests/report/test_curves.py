"""Journals of both objectives, of neither, and with holes."""

from __future__ import annotations

import math
from typing import Any

from discern.report.curves import last_held_out, run_charts

RTD = {
    "step": 10,
    "tokens": 99,
    "seconds": 1.0,
    "tokens_per_second": 99.0,
    "learning_rate": 1e-3,
    "grad_norm": 4.0,
    "loss": 40.0,
    "generator_loss": 8.0,
    "discriminator_loss": 0.6,
    "heldout_loss": 41.0,
    "heldout_generator_loss": 8.5,
    "generator_accuracy": 0.1,
    "sampled_accuracy": 0.05,
    "heldout_discriminator_loss": 0.65,
    "discriminator_accuracy": 0.8,
    "discriminator_auc": 0.7,
    "discriminator_precision": 0.6,
    "discriminator_recall": 0.2,
    "replaced_fraction": 0.25,
}
MLM = {"step": 5, "loss": 8.0, "mlm_loss": 8.0, "heldout_loss": 9.0, "heldout_mlm_loss": 9.0, "mlm_accuracy": 0.25}


def titles(*records: dict[str, Any]) -> list[str]:
    return [chart.title for chart in run_charts(records)]


def test_curves_of_replaced_token_detection() -> None:
    assert titles(RTD) == [
        "Loss, weighted sum",
        "Generator loss",
        "Discriminator loss",
        "Discriminator AUC, held out",
        "Generator accuracy, held out",
        "Discriminator at probability 1/2, held out",
        "Learning rate",
        "Gradient norm before clipping",
        "Speed of training",
    ]


def test_curves_of_masked_language_modeling() -> None:
    charts = run_charts([MLM])
    assert [chart.title for chart in charts] == ["Loss", "Accuracy of word prediction, held out"]
    assert [(line.label, line.steps, line.values) for line in charts[0].lines] == [
        ("training", [5], [8.0]),
        ("held out", [5], [9.0]),
    ]


def test_keys_that_are_missing_null_or_no_numbers_leave_holes() -> None:
    records = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": None}, {"step": 3}, {"step": 4, "loss": "x"}, {"step": 5, "loss": 1}]
    (chart,) = run_charts(records)
    assert [(line.steps, line.values) for line in chart.lines] == [([1, 5], [3.0, 1])]
    assert run_charts([{"step": 1}]) == []


def test_a_gradient_norm_of_zero_is_drawn_on_a_linear_axis() -> None:
    assert not run_charts([{"step": 1, "grad_norm": 0.0}, {"step": 2, "grad_norm": 1.0}])[0].logarithmic
    assert run_charts([{"step": 2, "grad_norm": 1.0}])[0].logarithmic


def test_metrics_are_of_the_last_evaluation_and_not_of_training() -> None:
    step, metrics = last_held_out([MLM, RTD, {"step": 20, "loss": 30.0}])
    assert step == 10
    assert [(metric.name, metric.value) for metric in metrics] == [
        ("Loss", 41.0),
        ("Generator loss", 8.5),
        ("Generator accuracy", 0.1),
        ("Sampled accuracy", 0.05),
        ("Discriminator loss", 0.65),
        ("Discriminator AUC", 0.7),
        ("Discriminator precision", 0.6),
        ("Discriminator recall", 0.2),
        ("Discriminator accuracy", 0.8),
        ("Replaced fraction", 0.25),
    ]
    assert all(metric.meaning for metric in metrics)


def test_what_answering_without_looking_would_give_is_told() -> None:
    meanings = {metric.name: metric.meaning for metric in last_held_out([RTD])[1]}
    entropy = math.log(4) - 0.75 * math.log(3)
    assert f"gives {entropy:.4f}." in meanings["Discriminator loss"]
    assert "gives 0.7500." in meanings["Discriminator accuracy"]


def test_a_sum_of_one_loss_is_not_told_twice() -> None:
    assert [metric.name for metric in last_held_out([MLM])[1]] == ["Loss", "Accuracy"]


def test_an_unknown_figure_is_shown_under_its_key() -> None:
    assert last_held_out([MLM | {"novelty": 1.5}])[1][-1].name == "novelty"


def test_nothing_evaluated() -> None:
    assert last_held_out([{"step": 1, "loss": 3.0}]) == (None, [])
