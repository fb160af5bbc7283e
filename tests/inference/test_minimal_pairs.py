"""BLiMP: reading pairs, counting preferences, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from discern.errors import ConfigError, DataError
from discern.inference.minimal_pairs import MinimalPair, Preferences, read_blimp, run_blimp
from discern.inference.scoring import load_scorer
from discern.model_files.run import BLIMP_FILE
from discern.progress import Silent
from discern.report.evaluation import read_blimp_results
from discern.report.run_page import report
from tests.small.run import make_run


def pair(paradigm: str, phenomenon: str) -> MinimalPair:
    return MinimalPair("The cats sleep.", "The cats sleeps.", paradigm, phenomenon)


def line(good: str, bad: str, paradigm: str, phenomenon: str = "agreement") -> str:
    values: dict[str, Any] = {"sentence_good": good, "sentence_bad": bad, "UID": paradigm, "linguistics_term": phenomenon}
    return json.dumps({**values, "field": "syntax", "pairID": "0", "simple_LM_method": True})


def test_a_pair_is_right_where_the_acceptable_sentence_scores_higher() -> None:
    preferences = Preferences()
    for paradigm, phenomenon, good, bad in [
        ("a1", "a", -1.0, -2.0),
        ("a1", "a", -2.0, -1.0),
        ("a2", "a", -1.0, -1.0),  # a tie: one half
        ("a2", "a", 0.5, -1.0),
        ("b1", "b", 1.0, 0.0),
    ]:
        preferences.add(pair(paradigm, phenomenon), good, bad)
    assert preferences.metrics() == {
        "accuracy": 3.5 / 5,
        "by_phenomenon": {"a": 2.5 / 4, "b": 1.0},
        "by_paradigm": {"a1": 1 / 2, "a2": 1.5 / 2, "b1": 1.0},
        "pairs": 5,
        "ties": 1,
        "ties_by_phenomenon": {"a": 1, "b": 0},
        "ties_by_paradigm": {"a1": 0, "a2": 1, "b1": 0},
    }


def test_who_prefers_nothing_is_at_guessing() -> None:
    preferences = Preferences()
    for _ in range(7):
        preferences.add(pair("a1", "a"), -3.0, -3.0)
    assert (preferences.metrics()["accuracy"], preferences.metrics()["ties"]) == (0.5, 7)


def test_files_are_read_in_the_order_of_their_names_and_up_to_the_limit(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text("".join(line(f"good {i}", f"bad {i}", name) + "\n" for i in range(3)))
    (tmp_path / "README.md").write_text("no pair")
    assert [(each.good, each.paradigm) for each in read_blimp(tmp_path, 2)] == [
        ("good 0", "a"),
        ("good 1", "a"),
        ("good 0", "b"),
        ("good 1", "b"),
    ]
    assert len(read_blimp(tmp_path)) == 6
    assert read_blimp(tmp_path)[0] == MinimalPair("good 0", "bad 0", "a", "agreement")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "a.jsonl:2: not JSON"),
        ("[1]", "a.jsonl:2: no text under sentence_good and sentence_bad and UID and linguistics_term"),
        ('{"sentence_good": "x", "sentence_bad": 3, "UID": "u", "linguistics_term": "t"}', "no text under sentence_bad$"),
    ],
)
def test_a_line_that_is_no_pair_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(line("x", "y", "a") + "\n" + content + "\n")
    with pytest.raises(DataError) as caught:
        read_blimp(tmp_path)
    assert caught.match(message) if not message.endswith("$") else caught.value.message.endswith(message[:-1])
    expected = "JSON lines have one object per line" if content == "{" else "expected a JSON object per line with sentence_good"
    assert str(caught.value.hint).startswith(expected)


def test_blank_lines_are_no_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"\n{line('x', 'y', 'a')}\n \r\n{line('v', 'w', 'a')}\n\n")
    (tmp_path / "b.jsonl").write_text("\n")
    assert [pair.good for pair in read_blimp(tmp_path)] == ["x", "v"]
    assert [pair.good for pair in read_blimp(tmp_path, 2)] == ["x", "v"], "nor do they count"


def test_files_without_a_pair_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"no pairs in the 2 \.jsonl files") as caught:
        read_blimp(tmp_path)
    assert caught.value.hint == "expected a JSON object per line with sentence_good, sentence_bad, UID, linguistics_term"


def test_a_folder_without_pairs_is_refused(tmp_path: Path) -> None:
    for folder, state in ((tmp_path, "has no .jsonl files"), (tmp_path / "nowhere", "does not exist")):
        with pytest.raises(DataError, match=state):
            read_blimp(folder)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is not a folder"):
        read_blimp(tmp_path / "file")


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


def test_the_limit_takes_the_first_of_each_paradigm(world: Path) -> None:
    found = run_blimp(world / "run", world / "pairs", Silent(), pytest.fail, limit=1, device="cpu")
    assert (found["pairs"], found["limit"]) == (2, 1)


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


@pytest.mark.usefixtures("unverified")
def test_a_damaged_file_of_figures_is_named(world: Path, tmp_path: Path) -> None:
    for content in ("{", "[]"):
        (tmp_path / BLIMP_FILE).write_text(content)
        with pytest.raises(DataError, match=r"blimp\.json is damaged"):
            read_blimp_results(tmp_path)
    make_run(tmp_path / "run")
    (tmp_path / "run" / BLIMP_FILE).write_text(json.dumps({"rtd": {"accuracy": 1.0}}))
    assert "BLiMP" not in report(tmp_path / "run", None).read_text()


def test_a_suite_needs_its_data(world: Path) -> None:
    with pytest.raises(ConfigError, match="needs a folder of data") as caught:
        run_blimp(world / "run", None, Silent(), pytest.fail)
    assert caught.value.hint is not None
    assert "--data DIR" in caught.value.hint
