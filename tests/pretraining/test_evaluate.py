"""`discern evaluate`: an export has the figures of its run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from discern.cli.evaluate import evaluate as evaluate_command
from discern.convert.export import export
from discern.data.dataset.build import BuildOptions
from discern.data.dataset.shards import TokenData
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.doctor.checks import examine
from discern.errors import ConfigError, DataError
from discern.pretraining.evaluate import evaluate
from discern.progress import Silent
from discern.report.run_page import report
from discern.storage.checksums import write_recorded
from tests.data.small_text import made_up, plain
from tests.interop.small_tokenizers import KINDS
from tests.small.run import make_run


def prepared(folder: Path, tokenizer: Path, heldout: float = 0.5) -> Path:
    """A data set of made-up text, a share of it held out, made with the tokenizer in a folder or file."""
    text = folder.with_suffix(".txt")
    text.write_text(plain(made_up(40)))
    build = BuildOptions(heldout=heldout, workers=1)
    prepare([str(text)], out=folder, tokenizer=TokenizerChoice(tokenizer), build=build, progress=Silent())
    return folder


def figures(model: Path, data: Path | None = None) -> dict[str, Any]:
    """The figures of the whole text."""
    found = evaluate(model, data=data, progress=Silent(), warn=pytest.fail)
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def exported(run: Path, out: Path, **options: Any) -> Path:
    return export(run, out=out, progress=Silent(), warn=pytest.fail, **options).folder


@pytest.mark.parametrize("packing", ["segments", "packed"])
@pytest.mark.parametrize(
    "settings",
    [
        ["objective.mask_probability=0.25", "objective.temperature=0.7", "objective.discriminator_weight=20.0"],
        ["objective.tying=gradient-disentangled", "objective.discriminator_head=bilinear"],
        ["objective.tying=none", "objective.generator_size=1.0"],
    ],
    ids=["shared", "disentangled and bilinear", "nothing shared"],
)
def test_an_export_has_the_figures_of_its_run(settings: list[str], packing: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=[*settings, f"data.packing={packing}"])
    folder = exported(tmp_path / "run", tmp_path / "out", all_networks=True)
    data = prepared(tmp_path / "data", folder)
    by_run, by_export = figures(tmp_path / "run"), figures(folder, data)
    assert by_run["rows"] > 20
    assert {"generator_accuracy", "discriminator_auc", "discriminator_recall", "replaced_fraction"} <= by_run.keys()
    assert by_export == pytest.approx(by_run, rel=1e-5)


def test_sixteen_bits_change_them_little(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    folder = exported(tmp_path / "run", tmp_path / "out", all_networks=True, precision="bfloat16")
    data = prepared(tmp_path / "data", folder)
    by_run, by_export = figures(tmp_path / "run"), figures(folder, data)
    assert by_export != by_run
    assert by_export == pytest.approx(by_run, rel=0.1, abs=0.05)


def test_a_masked_language_model(tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=["objective.name=mlm"])
    data = prepared(tmp_path / "data", exported(tmp_path / "run", tmp_path / "out"))
    by_export = figures(tmp_path / "out", data)
    assert "mlm_accuracy" in by_export
    assert by_export == pytest.approx(figures(tmp_path / "run"), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_text_prepared_with_the_tokenizer_of_an_export_fits_it(kind: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", tokenizer=kind)
    folder = exported(tmp_path / "run", tmp_path / "out", all_networks=True)
    assert figures(folder, prepared(tmp_path / "data", folder))["rows"] > 0


def test_an_export_needs_a_data_set(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    folder = exported(tmp_path / "run", tmp_path / "out", all_networks=True)
    with pytest.raises(ConfigError, match=r"no data set is given, and .* is an export") as caught:
        figures(folder)
    assert f"add --data DATA; made by: discern prepare TEXT --out DATA --tokenizer {folder}" in str(caught.value.hint)


def test_a_data_set_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    make_run(tmp_path / "other", tokenizer="wordpiece, cased")
    folder = exported(tmp_path / "run", tmp_path / "out", all_networks=True)
    data = prepared(tmp_path / "data", tmp_path / "other" / "tokenizer.json")
    for model, tokenizer in ((folder, folder), (tmp_path / "run", tmp_path / "run" / "tokenizer.json")):
        with pytest.raises(DataError, match="was made with a different tokenizer") as caught:
            figures(model, data)
        assert f"discern prepare TEXT --out DATA --tokenizer {tokenizer}" in str(caught.value.hint)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run")
    folder = exported(tmp_path / "run", tmp_path / "out", all_networks=True)
    data = prepared(tmp_path / "data", folder)
    evaluate_command(folder, data=data, json_output=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["step"] == 20
    assert 0 <= shown["discriminator_auc"] <= 1
    evaluate_command(folder, data=data, sequences=4)
    assert f"{folder} at step 20, 4 held-out rows" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        evaluate_command(exported(tmp_path / "run", tmp_path / "alone"), data=data)
    assert left.value.code == 2
    assert "discern export RUN --out DIR --all-networks" in capsys.readouterr().err


def test_the_figures_stay_with_the_run_and_reach_its_page(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    data = prepared(tmp_path / "data", tmp_path / "run" / "tokenizer.json")
    found = evaluate(tmp_path / "run", progress=Silent(), warn=pytest.fail)
    kept = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert kept == found
    assert sum(row["tokens"] for row in found["by_position"]) == sum(each["tokens"] for each in found["calibration"]["bins"])
    assert 0 <= found["calibration"]["expected_calibration_error"] <= 1
    page = report(tmp_path / "run", None).read_text(encoding="utf-8")
    assert "By frequency of the original token" in page
    assert "Calibration of the discriminator, held out" in page
    assert "http" not in page
    other = data.rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "evaluation.json").unlink()
    evaluate(tmp_path / "run", data=other, progress=Silent(), warn=pytest.fail)
    assert not (tmp_path / "run" / "evaluation.json").exists()


def test_figures_of_a_data_set_that_has_changed_are_not_those_of_the_run(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    data = prepared(tmp_path / "data", tmp_path / "run" / "tokenizer.json")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    write_recorded(tmp_path / "run", {"run.json": json.dumps({**record, "data_fingerprint": TokenData.open(data).fingerprint})})
    figures(tmp_path / "run")
    kept = (tmp_path / "run" / "evaluation.json").read_bytes()
    data.rename(tmp_path / "before")
    prepared(data, tmp_path / "run" / "tokenizer.json", heldout=0.3)
    warnings: list[str] = []
    evaluate(tmp_path / "run", progress=Silent(), warn=warnings.append)
    assert (tmp_path / "run" / "evaluation.json").read_bytes() == kept
    examine(tmp_path / "run", 4, "cpu", Silent(), warnings.append)
    said = f"{data} has changed since {tmp_path / 'run'} was trained on it: the metrics are those of its present text"
    assert warnings == [f"{said}, and are not stored for the report", said]
