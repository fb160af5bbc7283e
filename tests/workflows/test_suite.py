"""BLiMP: accuracies of a run by several scorers, kept for the report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from discern.errors import ConfigError, DataError
from discern.progress import Silent
from discern.workflows.report import report
from discern.workflows.score import load_scorer
from discern.workflows.suite import BLIMP_FILE, SuiteRequest, read_kept, run_blimp
from tests.scoring.test_minimal_pairs import line
from tests.workflows.small_run import make_run

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
    found = run_blimp(SuiteRequest(world / "run", world / "pairs", device="cpu"), Silent(), pytest.fail)
    scorer = load_scorer(world / "run", device="cpu", warn=pytest.fail)
    right = [scorer.score([good])[0].total > scorer.score([bad])[0].total + 1e-5 for good, bad in PAIRS]
    assert (found["suite"], found["scorer"], found["step"], found["limit"]) == ("blimp", "rtd", 20, None)
    assert (found["pairs"], found["ties"]) == (8, 2)  # this tokenizer lower-cases: "The meal" is "the meal"
    share = (sum(right) + 0.5) / 4
    assert found["accuracy"] == share
    assert found["by_paradigm"] == {"first": share, "second": share}
    assert found["by_phenomenon"] == {"agreement": share}
    assert found["by_scorer"].keys() == {"rtd"}


def test_the_limit_takes_the_first_of_each_paradigm(world: Path) -> None:
    found = run_blimp(SuiteRequest(world / "run", world / "pairs", limit=1, device="cpu"), Silent(), pytest.fail)
    assert (found["pairs"], found["limit"]) == (2, 1)


def test_several_scorers_stand_side_by_side_and_in_the_report(world: Path) -> None:
    request = SuiteRequest(world / "run", world / "pairs", scorers=("pll", "inversion"), device="cpu")
    found = run_blimp(request, Silent(), pytest.fail)
    assert found["scorer"] == "pll"
    assert list(found["by_scorer"]) == ["pll", "inversion"]
    run_blimp(SuiteRequest(world / "run", world / "pairs", limit=2, device="cpu"), Silent(), pytest.fail)
    kept = read_kept(world / "run")
    assert set(kept) == {"rtd", "pll", "inversion"}
    assert kept["pll"] == found["by_scorer"]["pll"]
    page = report(world / "run", None).read_text()
    assert "BLiMP by phenomenon" in page
    assert "pll at step 20: 8 pairs (all); ties, counted as one half: 2." in page
    assert "rtd at step 20: 4 pairs (the first 2 of each paradigm)" in page


def test_a_damaged_file_of_figures_is_named(world: Path, tmp_path: Path) -> None:
    for content in ("{", "[]"):
        (tmp_path / BLIMP_FILE).write_text(content)
        with pytest.raises(DataError, match=r"blimp\.json is damaged"):
            read_kept(tmp_path)
    make_run(tmp_path / "run")
    (tmp_path / "run" / BLIMP_FILE).write_text(json.dumps({"rtd": {"accuracy": 1.0}}))
    assert "BLiMP" not in report(tmp_path / "run", None).read_text()


def test_a_suite_needs_its_data(world: Path) -> None:
    with pytest.raises(ConfigError, match="none is given") as caught:
        run_blimp(SuiteRequest(world / "run", None), Silent(), pytest.fail)
    assert caught.value.hint is not None
    assert "--data DIR" in caught.value.hint
