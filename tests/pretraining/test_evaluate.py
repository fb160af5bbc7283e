"""`discern evaluate`: an export has the figures of its run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from discern.data.dataset.shards import TokenData
from discern.data.job import PrepareOptions
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.doctor.checks import examine
from discern.errors import ConfigError, DataError
from discern.model_files.export import export
from discern.pretraining.evaluate import evaluate
from discern.progress import Silent
from discern.report.run_page import report
from discern.storage.checksums import write_recorded
from tests.data.small_text import made_up, plain
from tests.small.run import make_run
from tests.support import run_discern


def prepared(folder: Path, tokenizer: Path, heldout: float = 0.5) -> Path:
    """A data set of made-up text, a share of it held out, made with the tokenizer in a folder or file."""
    text = folder.with_suffix(".txt")
    text.write_text(plain(made_up(40)))
    build = PrepareOptions(heldout=heldout, workers=1)
    prepare([str(text)], out=folder, tokenizer=TokenizerChoice(tokenizer), options=build, progress=Silent())
    return folder


def figures(model: Path, data: Path | None = None) -> dict[str, Any]:
    """The figures of the whole text."""
    results = evaluate(model, data=data, progress=Silent(), warn=pytest.fail)
    return {name: value for name, value in results.items() if isinstance(value, int | float)}


def exported(run: Path, out: Path, **options: Any) -> Path:
    return export(run, out=out, progress=Silent(), warn=pytest.fail, **options).folder


@pytest.fixture(scope="module")
def pair(small_model: Path) -> Path:
    """The export of both networks of a run that has a data set."""
    prepared(small_model.parent / "data", small_model / "tokenizer.json")
    return exported(small_model, small_model.parent / "pair", all_networks=True)


@pytest.mark.parametrize(
    "settings",
    [
        "mask_probability=0.25 objective.temperature=0.7 objective.discriminator_weight=20.0",
        "tying=gradient-disentangled objective.discriminator_head=bilinear data.packing=packed",
        "tying=none objective.generator_size=1.0",
        "name=mlm",
    ],
)
def test_an_export_has_the_figures_of_its_run(settings: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=f"objective.{settings}".split())
    folder = exported(tmp_path / "run", tmp_path / "out", all_networks=True)
    data = prepared(tmp_path / "data", folder)
    by_run = figures(tmp_path / "run")
    assert by_run["rows"] > 10
    expected = {"generator_accuracy", "discriminator_auc", "discriminator_recall", "replaced_fraction"}
    assert ({"mlm_accuracy"} if "mlm" in settings else expected) <= by_run.keys()
    assert figures(folder, data) == pytest.approx(by_run, rel=1e-5)


@pytest.mark.parametrize("tokenizer", ["bpe", "unigram"])
def test_text_prepared_with_the_tokenizer_of_an_export_fits_it(tokenizer: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", tokenizer=tokenizer)
    folder = exported(tmp_path / "run", tmp_path / "out", all_networks=True)
    assert figures(folder, prepared(tmp_path / "data", folder))["rows"] > 0


def test_sixteen_bits_change_them_little(small_model: Path, pair: Path, tmp_path: Path) -> None:
    half = exported(small_model, tmp_path / "half", all_networks=True, precision="bfloat16")
    by_run, by_export = figures(small_model), figures(half, pair.with_name("data"))
    assert by_export != by_run
    assert by_export == pytest.approx(by_run, rel=0.1, abs=0.05)


def test_a_data_set_that_is_missing_or_of_another_tokenizer_is_refused(small_model: Path, pair: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no data set is given, and .* is an export") as absent:
        figures(pair)
    assert f"add --data DATA; made by: discern prepare TEXT --out DATA --tokenizer {pair}" in str(absent.value.hint)
    make_run(tmp_path / "other", tokenizer="wordpiece, cased")
    data = prepared(tmp_path / "data", tmp_path / "other" / "tokenizer.json")
    for model, tokenizer in ((pair, pair), (small_model, small_model / "tokenizer.json")):
        with pytest.raises(DataError, match="was made with a different tokenizer") as caught:
            figures(model, data)
        assert f"discern prepare TEXT --out DATA --tokenizer {tokenizer}" in str(caught.value.hint)


def test_the_command(small_model: Path, pair: Path, tmp_path: Path) -> None:
    data = ("--data", pair.with_name("data"))
    shown = json.loads(run_discern("evaluate", pair, *data, "--json").stdout)
    assert shown["step"] == 20
    assert 0 <= shown["discriminator_auc"] <= 1
    assert f"{pair} at step 20, 4 held-out rows" in run_discern("evaluate", pair, *data, "--sequences", 4).stdout
    refused = run_discern("evaluate", exported(small_model, tmp_path / "alone"), *data)
    assert refused.returncode == 2
    assert "discern export RUN --out DIR --all-networks" in refused.stderr


def test_the_figures_of_its_own_data_stay_with_the_run_and_reach_its_page(tmp_path: Path) -> None:
    run, path = tmp_path / "run", tmp_path / "run" / "evaluation.json"
    make_run(run)
    data = prepared(tmp_path / "data", run / "tokenizer.json")
    fingerprint = TokenData.open(data).fingerprint
    write_recorded(run, {"run.json": json.dumps({**json.loads((run / "run.json").read_text()), "data_fingerprint": fingerprint})})
    results = evaluate(run, progress=Silent(), warn=pytest.fail)
    stored = path.read_bytes()
    assert json.loads(stored) == results
    assert sum(row["tokens"] for row in results["by_position"]) == sum(row["tokens"] for row in results["calibration"]["bins"])
    assert 0 <= results["calibration"]["expected_calibration_error"] <= 1
    page = report(run, None).read_text(encoding="utf-8")
    assert "By frequency of the original token" in page
    assert "Calibration of the discriminator, held out" in page
    assert "http" not in page
    # Other data, and its data after a change, leave what is stored alone.
    evaluate(run, data=data.rename(tmp_path / "elsewhere"), progress=Silent(), warn=pytest.fail)
    prepared(data, run / "tokenizer.json", heldout=0.3)
    warnings: list[str] = []
    evaluate(run, progress=Silent(), warn=warnings.append)
    assert path.read_bytes() == stored
    examine(run, 4, "cpu", Silent(), warnings.append)
    changed = f"{data} has changed since {run} was trained on it: the metrics are those of its present text"
    assert warnings == [f"{changed}, and are not stored for the report", changed]
