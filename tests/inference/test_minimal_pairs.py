"""BLiMP: reading pairs, counting preferences, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from discern.errors import ConfigError, DataError
from discern.inference.scoring.minimal_pairs import MinimalPair, preferences, read_blimp, run_blimp
from discern.inference.scoring.scorers import load_scorer
from discern.progress import Silent
from discern.report.metrics import read_blimp_results
from discern.report.run_page import report
from tests.small.run import make_run


def pair(paradigm: str, phenomenon: str) -> MinimalPair:
    return MinimalPair.model_validate(json.loads(line("The cats sleep.", "The cats sleeps.", paradigm, phenomenon)))


def line(good: str, bad: str, paradigm: str, phenomenon: str = "agreement") -> str:
    values: dict[str, Any] = {"sentence_good": good, "sentence_bad": bad, "UID": paradigm, "linguistics_term": phenomenon}
    return json.dumps({**values, "field": "syntax", "pairID": "0", "simple_LM_method": True})


def test_a_pair_is_right_where_the_acceptable_sentence_scores_higher() -> None:
    rows = [
        ("a1", "a", -1.0, -2.0),
        ("a1", "a", -2.0, -1.0),
        ("a2", "a", -1.0, -1.0),  # a tie: one half
        ("a2", "a", 0.5, -1.0),
        ("b1", "b", 1.0, 0.0),
    ]
    assert preferences((pair(paradigm, phenomenon), good, bad) for paradigm, phenomenon, good, bad in rows) == {
        "accuracy": 3.5 / 5,
        "by_phenomenon": {"a": 2.5 / 4, "b": 1.0},
        "by_paradigm": {"a1": 1 / 2, "a2": 1.5 / 2, "b1": 1.0},
        "pairs": 5,
        "ties": 1,
        "ties_by_phenomenon": {"a": 1, "b": 0},
        "ties_by_paradigm": {"a1": 0, "a2": 1, "b1": 0},
    }


def test_files_are_read_in_the_order_of_their_names_and_up_to_the_limit(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text("".join(line(f"good {i}", f"bad {i}", name) + "\n" for i in range(3)) + "\n \n")
    (tmp_path / "README.md").write_text("no pair")
    read = [(each.sentence_good, each.sentence_bad, each.UID) for each in read_blimp(tmp_path, 2)]
    assert read == [(f"good {i}", f"bad {i}", name) for name in "ab" for i in range(2)]
    assert len(read_blimp(tmp_path)) == 6


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "a.jsonl:2: not JSON"),
        ("[1]", "a.jsonl:2: list instead of an object"),
        (
            '{"sentence_good": "x", "sentence_bad": 3, "UID": "u", "linguistics_term": "t"}',
            "a.jsonl:2 is damaged: 'sentence_bad'",
        ),
    ],
)
def test_a_line_that_is_no_pair_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(line("x", "y", "a") + "\n" + content + "\n")
    with pytest.raises(DataError) as caught:
        read_blimp(tmp_path)
    assert message in caught.value.message


def test_a_folder_without_pairs_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "no"):
        with pytest.raises(DataError, match=r"has no \.jsonl files with pairs") as caught:
            read_blimp(folder)
        assert "sentence_good" in str(caught.value.hint)


PAIRS = [
    ("The chef cooked.", "The chef cook."),
    ("cats eat", "cats eats"),
    ("The meal", "the meal"),
    ("guests ate", "ate guests"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and two paradigms of one phenomenon."""
    folder = tmp_path_factory.mktemp("suite")
    make_run(folder / "run", overrides=["data.sequence_length=16"])
    (folder / "pairs").mkdir()
    for name in ("first", "second"):
        lines = [line(good, bad, name, "agreement") for good, bad in (PAIRS if name == "first" else PAIRS[::-1])]
        (folder / "pairs" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_accuracies_are_those_of_the_scores(world: Path) -> None:
    found = run_blimp(world / "run", world / "pairs", Silent(), pytest.fail, device="cpu")
    scorer = load_scorer(world / "run", device="cpu", warn=pytest.fail)
    right = [scorer.score([good])[0].total > scorer.score([bad])[0].total + 1e-5 for good, bad in PAIRS]
    assert (found["suite"], found["scorer"], found["step"], found["limit"]) == ("blimp", "rtd", 20, None)
    assert (found["pairs"], found["ties"]) == (8, 2)  # this tokenizer lower-cases: "The meal" is "the meal"
    share = (sum(right) + 0.5) / 4
    assert found["accuracy"] == share
    assert found["by_paradigm"] == {"first": share, "second": share}
    assert found["by_phenomenon"] == {"agreement": share}
    assert (found["ties_by_paradigm"], found["ties_by_phenomenon"]) == ({"first": 1, "second": 1}, {"agreement": 2})
    assert found["by_scorer"].keys() == {"rtd"}


def test_several_scorers_stand_side_by_side_and_in_the_report(world: Path) -> None:
    found = run_blimp(world / "run", world / "pairs", Silent(), pytest.fail, scorers=("pll", "inversion"), device="cpu")
    assert found["scorer"] == "pll"
    assert list(found["by_scorer"]) == ["pll", "inversion"]
    run_blimp(world / "run", world / "pairs", Silent(), pytest.fail, limit=2, device="cpu")
    kept = read_blimp_results(world / "run")
    assert set(kept) == {"rtd", "pll", "inversion"}
    assert kept["pll"] == found["by_scorer"]["pll"]
    page = report(world / "run", None).read_text()
    assert "BLiMP by phenomenon" in page
    assert "pll at step 20: 8 pairs (all); ties, counted as one half: 2." in page
    assert "rtd at step 20: 4 pairs (the first 2 of each paradigm)" in page


def test_a_suite_needs_its_data(world: Path) -> None:
    with pytest.raises(ConfigError, match="needs a folder of data"):
        run_blimp(world / "run", None, Silent(), pytest.fail)
