"""The page of a comparison: what it shows of figures made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from discern.report.charts import pareto_front
from discern.report.comparison import comparison_page, p_text, significance_notes, with_spread
from discern.report.page import render_page
from tests.report.test_page import NASTY, assert_stands_alone, structure


def spread(*values: float | None) -> dict[str, Any]:
    present = sorted(value for value in values if value is not None)
    ends = {"lowest": present[0], "highest": present[-1]} if present else {"lowest": None, "highest": None}
    return {"median": present[len(present) // 2] if present else None, **ends, "values": list(values)}


def row(name: str, score: float | None, flops: float | None, *, trained: bool = True) -> dict[str, Any]:
    values = spread(score, None if score is None else score + 0.1)
    points = [{"step": step, "flops": 100.0 * step, "mlm_loss": 5.0 / step, "heldout_mlm_loss": 6.0 / step} for step in (1, 2)]
    return {
        "name": name,
        "trained": trained,
        "network": "encoder",
        "finished_seeds": 2,
        "steps": 2,
        "flops": flops,
        "flops_paper_convention": flops,
        "seconds": None if flops is None else 1.5,
        "positions": 100,
        "parameters": 12,
        "shape": {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "feedforward_size": 16},
        "scores": {"rte": {"metric": "accuracy", "failed_finetunings": {}, **values}},
        "held_out": {"heldout_mlm_loss": spread(3.0, 3.5)} if trained else {},
        "failures": {},
        "settings": {"objective.name": name},
        "curves": [{"seed": seed, "points": points} for seed in (0, 1)] if trained else [],
    }


def comparison(*rows: dict[str, Any], p: float | None = 0.1, seeds: int = 3) -> dict[str, Any]:
    return {
        "complete": True,
        "equal": "flops",
        "convention": "executed",
        "budget": 200.0,
        "budget_unit": "FLOPs",
        "reference": rows[0]["name"],
        "seeds": [0, 1],
        "finetune_seeds": 1,
        "tasks": ["rte"],
        "data": {"fingerprint": "abcdef0123456789", "vocab_size": 92, "documents": 3, "tokens": None},
        "machines": [{"processor": "six hamsters", "cores": 2}],
        "versions": [{"torch": "2.13.0"}],
        "runs": list(rows),
        "significance": [
            {
                "run": each["name"],
                "against": rows[0]["name"],
                "task": "rte",
                "difference_of_medians": 0.1,
                "p": p,
                "exact": seeds < 11,
                "smallest_p": {3: 0.1, 5: 2 / 252}.get(seeds, 1.0),
                "verdict": "the seeds overlap",
                "seeds": [seeds, seeds],
            }
            for each in rows[1:]
        ],
        "notes": [],
    }


def test_a_page_stands_alone_and_shows_everything() -> None:
    page = comparison_page(
        comparison(row(f"a{NASTY}", 0.5, 200.0), row("b", 0.6, 201.0), row("untrained", 0.4, 0.0, trained=False))
    )
    html = render_page(page)
    assert_stands_alone(html)
    structure(html)
    for shown in ("six hamsters", "0.7000 (0.6000 to 0.7000)", "rte (accuracy)", "smallest p", "untrained"):
        assert shown in html, shown
    assert [chart.title for chart in page.charts] == [
        "Score against FLOPs of pre-training",
        "Score against seconds of pre-training",
        "Loss: training",
        "Loss: held out",
    ]
    # One line per seed, in the color of its run.
    assert [line.color for line in page.charts[2].lines] == [1, 1, 2, 2]


def test_unfinished_without_tasks_and_with_failures() -> None:
    bare = comparison(row("a", None, None), row("b", 0.6, 1e7))
    bare["complete"] = False
    bare["seeds"] = [0, 1, 2]
    bare["runs"][0]["failures"] = {"1": "step 3: the gradient is not finite"}
    html = render_page(comparison_page(bare))
    for shown in ("(not finished)", "gradient is not finite", "2 of 3 (1 diverged)", "remove", "left out of the medians"):
        assert shown in html, shown
    none = bare | {"tasks": [], "significance": []}
    assert "Scores after" not in render_page(comparison_page(none))


@pytest.mark.parametrize(
    ("seeds", "p", "says"),
    [
        (3, 0.1, "no difference can reach 0.05"),
        (1, None, "cannot be distinguished from chance"),
        (5, 0.01, "is 0.0079"),
        (11, 0.01, "200,000 random ways"),
    ],
)
def test_the_limits_of_few_seeds_are_said(seeds: int, p: float | None, says: str) -> None:
    lines = significance_notes(comparison(row("a", 0.5, 1.0), row("b", 0.6, 1.0), p=p, seeds=seeds))
    assert says in " ".join(lines)
    assert lines[0].startswith("p: exact permutation test") == (seeds < 11)
    assert significance_notes(comparison(row("a", 0.5, 1.0))) == []


def test_numbers_in_words() -> None:
    assert [p_text({"p": p}) for p in (None, 0.1, 0.001, 0.000155)] == ["–", "0.100", "0.001", "0.0002"]  # never 0
    assert with_spread(spread(0.5)) == "0.5000"
    assert with_spread(spread(None)) == "–"


def test_a_setting_that_is_none_is_a_difference() -> None:
    settings = {"objective.mask_probability_end": "none", "objective.other": None, "files.text": 'é "x"'}
    html = render_page(comparison_page(comparison(row("a", 0.5, 1.0), row("b", 0.6, 1.0) | {"settings": settings})))
    assert "objective.mask_probability_end" in html
    assert "objective.other" not in html
    assert "é &#34;x&#34;" in html


def test_pareto_front() -> None:
    points = [(1.0, 0.2), (2.0, 0.5), (2.0, 0.4), (3.0, 0.5), (4.0, 0.6)]
    assert pareto_front(points) == [(1.0, 0.2), (2.0, 0.5), (4.0, 0.6)]
