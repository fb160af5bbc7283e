"""BLiMP's tables in the report."""

from __future__ import annotations

from typing import Any

from discern.report.evaluation import blimp_tables


def figures(**changes: Any) -> dict[str, Any]:
    found = {"accuracy": 0.75, "by_phenomenon": {"island_effects": 0.5, "binding": 1.0}, "pairs": 4, "ties": 1, "step": 20}
    return {**found, "by_paradigm": {"wh_island": 0.5, "principle_A_case_1": 1.0}, "limit": None, **changes}


def test_a_column_a_scorer_and_the_whole_on_top() -> None:
    by_phenomenon, by_paradigm = blimp_tables({"electric": figures(), "pll": figures(accuracy=0.5, step=None, limit=2)})
    assert by_phenomenon.columns == ["phenomenon", "electric", "pll"]
    assert by_phenomenon.rows == [["overall", 0.75, 0.5], ["binding", 1.0, 1.0], ["island effects", 0.5, 0.5]]
    assert by_paradigm.rows == [["principle A case 1", 1.0, 1.0], ["wh island", 0.5, 0.5]]
    assert "electric at step 20: 4 pairs (all); ties, counted as one half: 1." in by_phenomenon.note
    assert "pll: 4 pairs (the first 2 of each paradigm)" in by_phenomenon.note


def test_what_one_scorer_lacks_is_blank() -> None:
    other = figures(by_paradigm={"wh_island": 0.25})
    rows = blimp_tables({"electric": figures(), "pll": other})[1].rows
    assert rows == [["principle A case 1", 1.0, ""], ["wh island", 0.5, 0.25]]


def test_nothing_to_show_gives_no_table() -> None:
    assert blimp_tables({}) == []
    assert blimp_tables({"rtd": 3, "pll": {"accuracy": 1.0}}) == []
