"""Runs that are watched: read as they grow, and as they are torn and deleted."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from discern.errors import DataError
from discern.serve.server import Access, short_names
from discern.serve.watch import RunsWatcher, watch_application, watch_page
from tests.report.test_page import structure
from tests.small.run import make_run

HELD_OUT = {"heldout_loss": 2.0, "discriminator_auc": 0.75, "discriminator_recall": 0.0, "replaced_fraction": 0.1}
EXAMPLES = {"step": 20, "rows": [{"original": [2, 7, 9], "corrupted": [2, 8, 9], "probability": [0.0, 0.75, 0.25]}]}


def line(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "tokens": step * 100,
        "seconds": step / 10,
        "loss": 10.0 / step,
        "tokens_per_second": 1000.0,
        "flops": 1e9,
        **more,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "<b>first"
    make_run(folder, metrics=[line(1), line(10), line(20, **HELD_OUT)], overrides=["train.max_steps=50"])
    (folder / "examples.jsonl").write_text(json.dumps(EXAMPLES) + "\n")
    return folder


def append(folder: Path, text: str) -> None:
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(text)


def card(watcher: RunsWatcher) -> dict[str, Any]:
    return watcher.read()[0].card()


@pytest.mark.usefixtures("unverified")
def test_a_run_says_where_it_is_and_how_long_it_takes(run: Path) -> None:
    watcher = RunsWatcher([run])
    found = card(watcher)
    assert (found["condition"], found["fraction"]) == ("training", pytest.approx(0.4))
    facts = {"Steps": "20 of 50", "Remaining": "0:03", "Speed": "1,000 tokens/s", "Newest checkpoint": "step 20"}
    assert found["facts"] == facts
    hour_ago = time.time() - 3600
    os.utime(run / "metrics.jsonl", (hour_ago, hour_ago))
    assert card(watcher)["condition"] == "no record for 60 minutes"
    append(run, json.dumps(line(50)) + '\n{"st')
    assert card(watcher)["condition"] == "finished"


@pytest.mark.parametrize("limit", [["train.max_hours=10"], ["train.max_hours=0.0001", "train.max_steps=5"]])
def test_a_run_with_one_record_can_be_finished(limit: list[str], tmp_path: Path) -> None:
    make_run(tmp_path / "run", metrics=[line(4)], overrides=["train.max_steps=4", *limit])
    found = card(RunsWatcher([tmp_path]))
    assert (found["condition"], found["facts"]["Remaining"]) == ("finished", "0:00")


def test_the_page_is_that_of_the_report(run: Path) -> None:
    make_run(run.parent / "second", metrics=[line(1)])
    html = watch_page(RunsWatcher([run.parent]), "tokens")
    structure(html)
    for shown in (
        "&lt;b&gt;first",
        "Loss: held out",
        "tokens (without padding)",
        "&lt;b&gt;first, step 20",
        "<td>Discriminator recall</td>",
        "Unusual: the discriminator predicts",
        "What the discriminator marks",
        'class="token marked" style="--p:0.750"',
    ):
        assert shown in html, shown


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("damage", ["config.toml", "run.json", "tokenizer.json", "examples.jsonl", "metrics.jsonl"])
def test_a_torn_file_does_not_break_the_page(run: Path, damage: str) -> None:
    append(run, json.dumps(line(30, loss=float("nan"))) + "\n")
    watcher = RunsWatcher([run])
    assert "30 of 50" in watch_page(watcher)
    (run / damage).write_bytes(b'\xff{"step": 1, "rows": [{"original": [99999999999999999999]}]}\n\x00\n[')
    assert "30 of 50" in watch_page(watcher)
    assert "&lt;b&gt;first" in watch_page(RunsWatcher([run]))


def test_a_run_that_vanishes_stays_on_the_page_and_a_new_one_joins(run: Path) -> None:
    watcher = RunsWatcher([run.parent])
    assert "Loss" in watch_page(watcher)
    shutil.rmtree(run)
    make_run(run.parent / "second", metrics=[line(1)])
    assert [each.card()["condition"] for each in watcher.read()] == ["gone", "training"]
    shutil.rmtree(run.parent)
    assert [each.card()["condition"] for each in watcher.read()] == ["gone", "gone"]
    assert "Loss" in watch_page(watcher)


def test_runs_of_the_same_name_are_told_apart() -> None:
    assert short_names([Path("small/rtd"), Path("mlm"), Path("large/rtd")]) == ["small/rtd", "mlm", "large/rtd"]
    assert short_names([Path("/rtd"), Path("/runs/rtd"), Path("/rtd")]) == ["/rtd", "runs/rtd", "/rtd"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(DataError, match="there is no run in"):
            RunsWatcher([folder])


def test_the_page_is_served(run: Path) -> None:
    app = watch_application(RunsWatcher([run]), Access(), pytest.fail)
    client = TestClient(app, base_url="http://127.0.0.1")  # type: ignore[arg-type]
    answer = client.get("/", params={"over": "nothing"})
    assert not [part for part in ('src="', "<link", "@import", "https:") if part in answer.text]
    assert "script-src 'sha256-" in answer.headers["content-security-policy"]
