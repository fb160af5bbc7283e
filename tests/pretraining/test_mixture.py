"""Runs on several data sets: what is recorded and measured of each, and that a resumed run continues exactly."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from discern.data.tokenizer.choice import TokenizerChoice
from discern.doctor.checks import examine
from discern.errors import ConfigError, DataError
from discern.model_files.run import read_record
from discern.pretraining.estimate import estimate
from discern.pretraining.evaluate import evaluate
from discern.pretraining.run import plan, pretrain
from discern.progress import Silent
from discern.report.run_page import report
from tests.pretraining.commands import CONSTANT, FAST, figures, weights
from tests.pretraining.test_adapt import DOMAIN, GENERAL, write_data

SCHEDULE = "data.mixture=[[0, [0.7, 0.3]], [0.5, [0.1, 0.9]]]"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("mixture")
    general = write_data(folder / "general", GENERAL, TokenizerChoice(train="wordpiece", vocab_size=150))
    return [general, write_data(folder / "domain", DOMAIN, TokenizerChoice(path=general / "tokenizer.json"))]


@pytest.fixture(scope="module")
def run(sources: list[Path]) -> Path:
    return trained(sources, sources[0].parents[1] / "run", SCHEDULE)


def trained(data: Any, out: Path, *overrides: str) -> Path:
    settings = ("train.max_steps=12", *FAST, *overrides)
    pretrain(data=data, out=out, preset="tiny", overrides=settings, progress=Silent())
    return out


def test_a_resumed_run_continues_exactly_across_another_mixture(sources: list[Path], run: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(run, tmp_path / "cut"))
    for step in (6, 9, 12):
        shutil.rmtree(out / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
    trained(sources, out, SCHEDULE)
    assert weights(out, 12) == weights(run, 12)
    assert "[\n        6," in (out / "config.toml").read_text()
    with pytest.raises(ConfigError, match=r"data\.mixture"):
        trained(dict.fromkeys(sources, 1.0), out)


def test_each_source_is_recorded_and_measured(sources: list[Path], run: Path) -> None:
    record, last = read_record(run), figures(run)[-1]
    assert record["data"] == [str(source) for source in sources]
    assert record["mixture"] == {"general": pytest.approx(0.1), "domain": pytest.approx(0.9)}
    of: Any = last["heldout_by_source"]
    for key in ("heldout_loss", "discriminator_auc"):
        assert last[key] == pytest.approx(0.1 * of["general"][key] + 0.9 * of["domain"][key])
    results = evaluate(run, progress=Silent(), warn=pytest.fail)
    assert results["heldout_by_source"]["domain"]["discriminator_auc"] == pytest.approx(of["domain"]["discriminator_auc"])
    apart = [evaluate(run, data=source, progress=Silent(), warn=pytest.fail) for source in sources]
    assert results["rows"] == sum(each["rows"] for each in apart)
    assert results["heldout_by_source"]["general"]["heldout_loss"] == pytest.approx(apart[0]["loss"])
    assert json.loads((run / "evaluation.json").read_text()) == results
    assert examine(run, 8, "cpu", Silent(), pytest.fail)["findings"]
    assert "Share of domain" in report(run, None).read_text(encoding="utf-8")


def test_the_plan_tells_the_mixture(sources: list[Path], tmp_path: Path) -> None:
    weights = dict(zip(sources, (3.0, 1.0), strict=True))
    found = estimate(plan(data=weights, out=tmp_path / "out", preset="tiny", warn=pytest.fail)).values["mixture"]
    assert {each["source"]: each["weight"] for each in found} == {"general": 0.75, "domain": 0.25}


def test_a_run_on_a_mixture_decays(sources: list[Path], tmp_path: Path) -> None:
    run = trained(sources, tmp_path / "run", *CONSTANT)
    settings = ["optimizer.decay_steps=2"]
    pretrain(data=sources, out=tmp_path / "decayed", decay_from=run, overrides=settings, progress=Silent())
    assert figures(tmp_path / "decayed")[-1]["step"] == 14


def test_sources_that_cannot_be_mixed(sources: list[Path], tmp_path: Path) -> None:
    other = write_data(tmp_path / "other", DOMAIN, TokenizerChoice(train="bpe", vocab_size=300))
    memory = ["objective.name=permutation-lm", "model.encoder=xlnet", "model.embedding_size=32", "data.packing=two-part"]
    for data, overrides, says in (
        ([sources[0], other], [], rf"{other} was made with a different tokenizer .* from that of {sources[0]}"),
        ([sources[0], sources[0]], [], "a data set is given twice"),
        (sources[:1], [SCHEDULE], "has 2 weights, but --data names 1: general"),
        (sources, [*memory, "objective.memory_length=24"], "objective.memory_length remembers the text before each row"),
    ):
        with pytest.raises((ConfigError, DataError), match=says):
            plan(data=data, out=tmp_path / "out", preset="tiny", overrides=overrides, warn=pytest.fail)
    trained(sources, tmp_path / "out", *memory, "objective.memory_length=0")
