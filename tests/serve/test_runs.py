"""Runs that are watched: read as they grow, and as they are torn, replaced and deleted."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from discern.data.tokenizer.training import train_tokenizer
from discern.errors import DataError
from discern.serve.access import Access
from discern.serve.limits import Limits
from discern.serve.names import short_names
from discern.serve.runs import RunsWatcher, Tail, WatchedRun, snapshot
from discern.serve.watch_app import watch_application
from tests.small.run import make_run


def line(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "tokens": step * 100, "seconds": step / 10, "loss": 10.0 / step, "tokens_per_second": 1000.0, **more}


EXAMPLES = {"step": 20, "rows": [{"original": [2, 7, 9], "corrupted": [2, 8, 9], "probability": [0.0, 0.75, 0.25]}]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "<b>first"
    held_out = {"heldout_loss": 2.0, "discriminator_auc": 0.75, "discriminator_recall": 0.0, "replaced_fraction": 0.1}
    make_run(folder, metrics=[line(1), line(10), line(20, **held_out)], overrides=["train.max_steps=50"])
    (folder / "examples.jsonl").write_text(json.dumps(EXAMPLES) + "\n")
    return folder


def append(folder: Path, text: str) -> None:
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write(text)


def test_a_file_is_read_as_it_grows_and_again_if_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    tail.read()
    assert tail.records == []
    path.write_text('{"step": 1}\n{"st')
    tail.read()
    assert [each["step"] for each in tail.records] == [1]
    with path.open("a") as stream:
        stream.write('ep": 2}\nnonsense\n{"step": "x"}\n{"step": 3}\n')
    tail.read()
    assert [each["step"] for each in tail.records] == [1, 2, 3]
    version = tail.version
    tail.read()
    assert tail.version == version
    other = tmp_path / "other"
    other.write_text('{"step": 1, "again": 1}\n')
    other.replace(path)  # as a resumed run does
    tail.read()
    assert tail.records == [{"step": 1, "again": 1}]
    path.unlink()
    tail.read()
    assert len(tail.records) == 1
    assert tail.changed_at is None


def test_a_run_says_where_it_is_and_how_long_it_takes(run: Path) -> None:
    watched = WatchedRun(run)
    watched.read()
    state = watched.state(time.time())
    assert (state["condition"], state["step"], state["max_steps"], state["checkpoint"]) == ("training", 20, 50, 20)
    assert state["seconds_left"] == pytest.approx(3.0)
    assert state["progress"] == pytest.approx(0.4)
    assert watched.state(time.time() + 3600)["condition"] == "silent"
    append(run, json.dumps(line(50)) + "\n")
    watched.read()
    assert watched.state(time.time())["condition"] == "finished"


def test_a_run_with_one_record_can_be_finished(tmp_path: Path) -> None:
    timed = {"run": [], "timed": ["train.max_hours=10"], "time used": ["train.max_hours=0.0001", "train.max_steps=5"]}
    for name, more in timed.items():
        make_run(tmp_path / name, metrics=[line(4)], overrides=["train.max_steps=4", *more])
        watched = WatchedRun(tmp_path / name)
        watched.read()
        state = watched.state(time.time())
        assert (state["condition"], state["seconds_left"], state["progress"]) == ("finished", 0, 1)
        assert state["time_used"] is (name == "time used")


def test_numbers_of_others_do_not_break_the_page(run: Path) -> None:
    append(run, '{"step": 30, "loss": NaN, "seconds": "x", "tokens_per_second": Infinity, "peak_memory_bytes": NaN}\n')
    json.dumps(snapshot(RunsWatcher([run]), []), allow_nan=False)


def test_what_a_page_knows_from_an_earlier_server_is_sent_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = snapshot(RunsWatcher([run]), [])["runs"][0]["version"]
    monkeypatch.setattr("discern.serve.runs._STARTED", "later")
    assert "curves" in snapshot(RunsWatcher([run]), [known])["runs"][0]


def test_curves_findings_and_examples(run: Path) -> None:
    watched = WatchedRun(run)
    watched.read()
    found = watched.curves()
    assert found["curves"]["loss"] == [[10.0, 1, 100, None, 0.1], [1.0, 10, 1000, None, 1.0], [0.5, 20, 2000, None, 2.0]]
    assert [each[0] for each in found["curves"]["discriminator_auc"]] == [0.75]
    assert found["evaluated"] == 20
    assert "discriminator_recall" in {each["name"] for each in found["findings"]}
    (example,) = found["examples"]
    assert [each["p"] for each in example["rows"][0]] == [0.0, 0.75, 0.25]
    assert ["was" in each for each in example["rows"][0]] == [False, True, False]


@pytest.mark.usefixtures("unverified")
def test_examples_are_read_as_text_whatever_the_vocabulary(run: Path) -> None:
    tokenizer = train_tokenizer("bpe", 300, False, ["the chef cooked the meals"] * 5)
    tokenizer.save(str(run / "tokenizer.json"))
    original = tokenizer.encode("the chef yz").ids
    corrupted = [*original]
    corrupted[-2], corrupted[-3] = original[1], original[-2]
    record = {"original": original, "corrupted": corrupted, "probability": [0.5] * len(original)}
    (run / "examples.jsonl").write_text(json.dumps({"step": 20, "rows": [record]}) + "\n")
    watched = WatchedRun(run)
    watched.read()
    ((pieces,),) = (each["rows"] for each in watched.curves()["examples"])
    assert "".join(("" if piece["joined"] else " ") + piece["text"].strip() for piece in pieces) == " [CLS] the chef z the [SEP]"
    assert [piece["was"] for piece in pieces if "was" in piece] == ["y", "z"]
    assert watched.curves()["examples"][0]["rows"][0] is pieces, "records that were read are not read again"


def test_a_long_curve_keeps_its_ends(tmp_path: Path) -> None:
    make_run(tmp_path / "run", metrics=[line(step) for step in range(1, 5001)])
    watched = WatchedRun(tmp_path / "run")
    watched.read()
    steps = [point[1] for point in watched.curves()["curves"]["loss"]]
    assert (steps[0], steps[-1]) == (1, 5000)
    assert len(steps) <= 402


@pytest.mark.parametrize("damage", ["config.toml", "run.json", "tokenizer.json", "examples.jsonl", "metrics.jsonl"])
def test_a_torn_file_takes_nothing_else_with_it(run: Path, damage: str) -> None:
    (run / damage).write_bytes(b'\xff{"step": 1, "rows": [{"original": [99999999999999999999]}]}\n\x00\n[')
    found = snapshot(RunsWatcher([run]), [])
    json.dumps(found, allow_nan=False)
    assert found["runs"][0]["name"] == run.name


def test_a_run_that_vanishes_stays_on_the_page_and_a_new_one_joins(run: Path) -> None:
    watcher = RunsWatcher([run.parent])
    first = snapshot(watcher, [])["runs"]
    assert [each["condition"] for each in first] == ["training"]
    unchanged = snapshot(watcher, [first[0]["version"]])["runs"]
    assert "curves" not in unchanged[0]
    shutil.rmtree(run)
    make_run(run.parent / "second", metrics=[line(1)])
    gone, second = snapshot(watcher, [])["runs"]
    assert gone["condition"] == "gone"
    assert len(gone["curves"]["loss"]) == 3
    assert second["name"] == "second"
    shutil.rmtree(run.parent)
    assert [each["condition"] for each in snapshot(watcher, [])["runs"]] == ["gone", "gone"]


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    for place in ("small/rtd", "large/rtd", "large/mlm"):
        make_run(tmp_path / place, metrics=[line(1)])
    found = snapshot(RunsWatcher([tmp_path / "small", tmp_path / "large"]), [])["runs"]
    assert [each["name"] for each in found] == ["small/rtd", "mlm", "large/rtd"]
    assert short_names([tmp_path / "rtd", tmp_path / "rtd"]) == ["rtd", "rtd"]  # the same folder
    assert short_names([Path("/rtd"), Path("/runs/rtd")]) == ["/rtd", "runs/rtd"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        RunsWatcher([tmp_path / "nothing"])
    with pytest.raises(DataError, match="there is no run in"):
        RunsWatcher([tmp_path])


@pytest.fixture
def client(run: Path) -> TestClient:
    app = watch_application(RunsWatcher([run]), Access(), Limits(), pytest.fail)
    return TestClient(app, base_url="http://127.0.0.1")  # type: ignore[arg-type]


def test_the_page_and_its_data(client: TestClient, run: Path) -> None:
    page = client.get("/")
    assert "<html" in page.text
    assert not [part for part in ('src="', "<link", "@import", "url(") if part in page.text]
    assert run.name not in page.text  # names of runs arrive as data, and become text nodes
    found = client.get("/data").json()
    assert found["runs"][0]["curves"]
    assert found["machine"]["cores"] >= 1
    again = client.get("/data", params={"known": found["runs"][0]["version"]}).json()
    assert "curves" not in again["runs"][0]
    assert client.get("/data", headers={"host": "evil.example"}).status_code == 403
