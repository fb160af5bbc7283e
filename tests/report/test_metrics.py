"""Metrics logs of several objectives, and results of evaluations, as charts and tables."""

from __future__ import annotations

from typing import Any

from discern.report.metrics import blimp_tables, group_tables, held_out_table, last_held_out, metric_charts

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
MLM = {"step": 5, "tokens": 50, "loss": 8.0, "mlm_loss": 8.0, "heldout_loss": 9.0, "heldout_mlm_loss": 9.0, "mlm_accuracy": 0.25}


def drawn(*records: dict[str, Any]) -> dict[str, dict[str, tuple[tuple[float, ...], tuple[float, ...]]]]:
    """Steps and values by title and label of a run's curves."""
    charts = metric_charts({"run": [records]})
    return {chart.title: {line.label: (line.steps, line.values) for line in chart.lines} for chart in charts}


def test_the_curves_of_a_run() -> None:
    assert [*drawn(RTD)] == [
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
    # With one term, the sum is the same number; keys that are missing, null or no numbers leave holes.
    records = [MLM, {"step": 6, "loss": None}, {"step": 7}, {"step": 8, "loss": "x"}, {"step": 9, "loss": 1}]
    assert drawn(*records) == {
        "Loss": {"training": ((5, 9), (8.0, 1)), "held out": ((5,), (9.0,))},
        "Accuracy of word prediction, held out": {"positions of the loss": ((5,), (0.25,))},
    }
    assert drawn({"step": 1}) == {}


def test_the_curves_of_several_runs_share_charts_and_keep_their_colors() -> None:
    charts = {chart.title: chart for chart in metric_charts({"a": [[RTD], [RTD]], "b": [[MLM]], "c": [[RTD]]}, "tokens")}
    assert [(line.label, line.color, line.steps) for line in charts["Loss, weighted sum: training"].lines] == [
        ("a", 1, (99,)),
        ("a", 1, (99,)),
        ("b", 2, (50,)),
        ("c", 3, (99,)),
    ]
    assert charts["Generator loss: held out"].legend == {"a": 1, "c": 3}
    assert charts["Discriminator AUC, held out"].x_label == "tokens (without padding)"
    assert metric_charts({"a": [[MLM]]}, "flops") == []


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    (chart,) = metric_charts({"run": [[{"step": step, "loss": 1.0} for step in range(1, 5001)]]})
    steps = chart.lines[0].steps
    assert (steps[0], steps[-1]) == (1, 5000)
    assert 300 < len(steps) <= 402


def test_metrics_are_of_the_last_evaluation_and_not_of_training() -> None:
    step, metrics = last_held_out([MLM, RTD, {"step": 20, "loss": 30.0}])
    assert step == 10
    rows = held_out_table("Held out", {"Value": metrics}).rows
    assert [row[0] for row in rows[:3]] == ["Loss", "Generator loss", "Generator accuracy"]
    assert [row[1] for row in rows] == [41.0, 8.5, 0.1, 0.05, 0.65, 0.7, 0.6, 0.2, 0.8, 0.25]
    assert all(row[2] for row in rows), "each has its meaning"
    assert last_held_out([MLM | {"novelty": 1.5}]) == (5, {"heldout_mlm_loss": 9.0, "mlm_accuracy": 0.25, "novelty": 1.5})
    assert last_held_out([{"step": 1, "loss": 3.0}]) == (None, {})
    beside = held_out_table("Held out", {"a": metrics, "b": {"discriminator_auc": 0.5, "novelty": 1.5}})
    assert beside.columns == ("Metric", "a", "b")
    assert ["Discriminator AUC", 0.7, 0.5] in beside.rows
    assert ["novelty", None, 1.5] in beside.rows


def test_the_groups_of_an_evaluation() -> None:
    results = {
        "by_frequency": [{"group": "rare", "discriminator_auc": 0.6}, {"group": "common", "prediction_accuracy": 0.5}],
        "by_position": [],
    }
    by_frequency, by_position = group_tables(results)
    assert by_frequency.rows == [["rare", 0.6, None, None], ["common", None, None, 0.5]]
    assert not by_position.rows


def test_minimal_pairs_have_a_column_for_each_scorer_and_the_whole_on_top() -> None:
    figures: dict[str, Any] = {
        "accuracy": 0.75,
        "by_phenomenon": {"island_effects": 0.5, "binding": 1.0},
        "pairs": 4,
        "ties": 1,
        "step": 20,
        "limit": None,
    }
    other = figures | {"accuracy": 0.5, "step": None, "limit": 2, "by_phenomenon": {"binding": 0.25}}
    (table,) = blimp_tables({"electric": figures, "pll": other})
    assert table.columns == ("phenomenon", "electric", "pll")
    assert table.rows == [["overall", 0.75, 0.5], ["binding", 1.0, 0.25], ["island effects", 0.5, None]]
    assert "electric at step 20: 4 pairs (all); ties, counted as one half: 1." in table.note
    assert "pll: 4 pairs (the first 2 of each paradigm)" in table.note
    assert blimp_tables({}) == []
