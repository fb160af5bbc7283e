"""`discern detect --calibrate`: the threshold of a precision, on the shipped model and text that its generator corrupts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from discern.cli.detect import detect as detect_command
from discern.data.build import BuildOptions
from discern.data.packed import PackedRows
from discern.data.shards import TokenData
from discern.data.stream import ExampleStream
from discern.data.tokenizer_choice import TokenizerChoice
from discern.errors import ConfigError, DataError
from discern.interop.names import CALIBRATION_NAME
from discern.progress import Silent
from discern.scoring.calibration import judge_corrupted
from discern.workflows.detect import load_detection_model, load_detector
from discern.workflows.detect_calibrate import CalibrateRequest, calibrate, chosen_threshold
from discern.workflows.export import ExportRequest, export
from discern.workflows.prepare import PrepareRequest, prepare
from tests.workflows.small_run import make_run

SHIPPED = Path(__file__).parents[2] / "examples" / "models" / "cpu-small"
TEXT = """The river rises in the hills north of the town and flows south to the sea.
It was built in the early nineteenth century by the railway company.
He was elected to the council in 1921 and served for three years.
The film was released in the United States and received mixed reviews.
She studied law at the university before she moved to the capital.
The species is found in forests and is threatened by the loss of habitat.
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate")
    (folder / "a.txt").write_text("\n".join(f"{line}\n" for line in TEXT.splitlines() * 4))
    return prepared(folder / "a.txt", folder / "data", 0.9)


def prepared(text: Path, out: Path, heldout: float) -> Path:
    request = PrepareRequest((str(text),), out, TokenizerChoice(path=SHIPPED), build=BuildOptions(heldout=heldout, workers=1))
    prepare(request, Silent())
    return out


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(SHIPPED, tmp_path / "model")
    return tmp_path / "model"


def found(model: Path, data: Path, precision: float, **options: Any) -> dict[str, Any]:
    return calibrate(CalibrateRequest(model, data, precision, **options), Silent(), pytest.fail)


def test_the_threshold_has_the_precision_that_it_says(model: Path, data: Path) -> None:
    values = found(model, data, 0.5, corruption=0.3)
    assert values["reached"]
    assert values["precision"] == values["hits"] / values["marked"] >= 0.5
    assert values["recall"] == values["hits"] / values["replaced"]
    assert values["marked"] >= 20
    # Counted again, from the discriminator's answers.
    loaded = load_detection_model(model, pytest.fail)
    assert loaded.proposer is not None
    heldout = TokenData.open(data)
    rows = PackedRows(heldout.split("heldout"), heldout.special_tokens, loaded.proposer_room + 2, 0, rotate=False)
    judged = judge_corrupted(
        loaded.detector.network,
        loaded.proposer,
        ExampleStream(rows, 0, shuffle=False),
        corruption=0.3,
        sequences=0,
        progress=Silent(),
    )
    marked = judged.probability >= values["threshold"]
    assert int(marked.sum()) == values["marked"]
    assert int((marked & judged.is_replaced).sum()) == values["hits"]


def test_it_is_kept_beside_the_model_and_gone_by(model: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    detector = load_detector(model, pytest.fail)
    assert chosen_threshold(model, detector, None, pytest.fail).origin == "default"
    values = found(model, data, 0.5, corruption=0.3)
    assert values["kept"] == model / CALIBRATION_NAME
    chosen = chosen_threshold(model, detector, None, pytest.fail)
    assert (chosen.value, chosen.origin, chosen.precision) == (values["threshold"], "calibrated", 0.5)
    assert chosen.described == "calibrated for precision 0.5"
    assert chosen_threshold(model, detector, 0.25, pytest.fail).value == 0.25
    detect_command(model, text=["She was elected banana."], json_output=True)
    assert json.loads(capsys.readouterr().out)["threshold"] == values["threshold"]


def test_twice_is_the_same(model: Path, data: Path) -> None:
    assert found(model, data, 0.5) == found(model, data, 0.5)


def test_other_weights_go_by_one_half(model: Path, data: Path) -> None:
    found(model, data, 0.5, corruption=0.3)
    detector = load_detector(model, pytest.fail)
    with torch.no_grad():
        detector.network.head.output.bias += 0.01
    said: list[str] = []
    assert chosen_threshold(model, detector, None, said.append).value == 0.5
    assert "was calibrated for other weights" in said[0]


def test_a_precision_out_of_reach_is_said_and_nothing_is_kept(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        detect_command(model, calibrate=data, precision=1.0, corruption=0.05, json_output=True)
    assert left.value.code == 1
    values = json.loads(capsys.readouterr().out)
    assert (values["reached"], values["wanted_precision"], values["kept"]) == (False, 1.0, None)
    assert 0 < values["precision"] < 1
    assert not (model / CALIBRATION_NAME).exists()
    with pytest.raises(SystemExit):
        detect_command(model, calibrate=data, precision=1.0, corruption=0.05)
    printed = capsys.readouterr().out
    assert "no threshold reaches precision 1 on this text" in printed
    assert f"the most precise is {values['threshold']:.4f}: precision {values['precision']:.3f}" in printed


def test_a_folder_that_cannot_be_written_to_is_no_reason_to_fail(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("discern.workflows.detect_calibrate.write_text", refuse)
    said: list[str] = []
    values = calibrate(CalibrateRequest(model, data, 0.5, 0.3), Silent(), said.append)
    assert values["kept"] is None
    assert "Permission denied" in said[0]
    assert "--threshold" in said[0]


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1, "threshold": 7}', '{"format": 2}'])
def test_a_damaged_calibration_is_named(content: str, model: Path) -> None:
    (model / CALIBRATION_NAME).write_text(content)
    with pytest.raises(DataError, match=r"detection\.json (is damaged|has format 2)") as caught:
        chosen_threshold(model, load_detector(model, pytest.fail), None, pytest.fail)
    assert "--threshold" in str(caught.value.hint)


def test_a_model_without_a_generator_is_refused(tmp_path: Path, data: Path) -> None:
    make_run(tmp_path / "run")
    export(ExportRequest(tmp_path / "run", tmp_path / "alone"), Silent(), pytest.fail)
    with pytest.raises(ConfigError, match="holds no generator") as caught:
        found(tmp_path / "alone", data, 0.5)
    assert "--all-networks" in str(caught.value.hint)


def test_data_of_another_tokenizer_is_refused(tmp_path: Path, data: Path) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(DataError, match="another tokenizer") as caught:
        found(tmp_path / "run", data, 0.5)
    assert "--tokenizer" in str(caught.value.hint)


def test_too_little_text_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The river rises.\n\nIt was built in the town.\n")
    for heldout, said in ((0.5, "holds too little out"), (0.0, "has no held-out split")):
        out = prepared(tmp_path / "a.txt", tmp_path / f"data{heldout}", heldout)
        with pytest.raises(DataError, match=said):
            found(model, out, 0.5)


def test_an_export_is_replaced_calibration_and_all(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    for _ in range(2):
        export(ExportRequest(tmp_path / "run", tmp_path / "out"), Silent(), pytest.fail)
        assert not (tmp_path / "out" / CALIBRATION_NAME).exists()
        (tmp_path / "out" / CALIBRATION_NAME).write_text("{}")
