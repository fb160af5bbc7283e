"""Folders that discern wrote under older names of settings: they are read, and runs are resumed, with the same numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from discern.cli.main import application

WRITTEN = Path(__file__).parent / "fixtures" / "before_rooms"

# Steps 5 to 8 as the code that wrote the runs computed them, in float32 with the kernels.
LOSSES = {
    "rtd": [37.45747928194494, 35.7299953417221, 33.07594994261255, 31.740955278749244],
    "xlnet": [4.868483189174107, 4.854770183563232, 4.843645432416131, 4.83985108595628],
}


def discern(*arguments: str | Path) -> dict[str, Any]:
    done = CliRunner().invoke(application(), [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_a_run_resumes_with_the_same_numbers(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(WRITTEN / name, run)
    discern("pretrain", run / "config.toml", "--data", WRITTEN / "data", "--out", run, "--set", "train.max_steps=8")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if line["step"] > 4] == pytest.approx(LOSSES[name], rel=1e-4)


def test_a_run_is_evaluated(tmp_path: Path) -> None:
    shutil.copytree(WRITTEN / "rtd", tmp_path / "run")
    assert discern("evaluate", tmp_path / "run", "--data", WRITTEN / "data")["generator_loss"] < 5


def test_an_export_is_read_and_trained_further(tmp_path: Path) -> None:
    assert len(discern("detect", WRITTEN / "model", "--text", "The old town.")["tokens"]) >= 3
    steps = "--set", "train.max_steps=2"
    data = "--data", WRITTEN / "data"
    assert discern("pretrain", "--init-from", WRITTEN / "model", *data, "--out", tmp_path / "run", *steps)["step"] == 2
    steps = *steps, "--set", "optimizer.warmup_steps=1"  # its own is longer than the run
    again = discern("pretrain", WRITTEN / "model" / "discern.toml", *data, "--out", tmp_path / "again", *steps)
    assert again["step"] == 2


def test_a_fine_tuned_model_predicts(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("the river near a bridge\nfruit in spring\n")
    discern("predict", WRITTEN / "tuned", tmp_path / "texts.txt", "--out", tmp_path / "found.jsonl")
    assert len((tmp_path / "found.jsonl").read_text().splitlines()) == 2


def test_a_fine_tuning_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(WRITTEN, tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")  # its files are named relative to here
    scores = (WRITTEN / "tuned" / "seed-0" / "scores.json").read_bytes()
    (tmp_path / "there" / "tuned" / "results.json").unlink()  # as if interrupted before the summary
    found = discern("finetune", "model", "--config", "tuned/config.toml", "--out", "tuned")
    assert found["seeds"] == [0]
    assert Path("tuned/seed-0/scores.json").read_bytes() == scores, "what was finished is not done again"


def test_a_fine_tuning_on_pairs_keeps_the_head_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of earlier versions compare states alone."""
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"the river {n},a bridge {n % 3},{'yes' if n % 2 else 'no'}\n" for n in range(24))
    for name in ("train", "dev"):
        Path(f"{name}.csv").write_text("a,b,same\n" + rows)
    files = "--set", "files.train=train.csv", "--set", "files.dev=dev.csv", "--set", "files.text=a", "--set", "files.pair=b"
    command = (
        *("finetune", WRITTEN / "model", *files, "--set", "files.label=same", "--set", "train.max_steps=4", "--no-baselines"),
        *("--out", "tuned"),
    )
    discern(*command, "--set", "task.compare_words=false")
    for name in ("config.toml", "finetuned.json"):  # as the earlier version wrote them
        lines = Path("tuned", name).read_text().splitlines(keepends=True)
        Path("tuned", name).write_text("".join(line for line in lines if "compare_words" not in line))
    monkeypatch.setenv("DISCERN_VERIFY", "0")
    assert discern(*command, "--seeds", "2")["seeds"] == [0, 1]
    assert discern("evaluate", "tuned", "--data", "dev.csv")["examples"] == 24
    refused = CliRunner().invoke(application(), [*map(str, command), "--set", "task.compare_words=true"])
    assert refused.exit_code == 2
    assert "different settings: task.compare_words" in refused.output
