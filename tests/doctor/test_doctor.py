"""`discern doctor`: of a run, of a run whose data set is gone, and of this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from discern.cli.doctor import doctor
from discern.cli.main import main
from discern.data.dataset.shards import TokenData
from discern.doctor.checks import CPU_TORCH, Diagnosis, examine
from discern.errors import CheckpointError, DataError
from discern.model_files.run import COUNTS_FILE, counts_text
from discern.progress import Silent
from tests.pretraining.test_evaluate import prepared
from tests.small.run import make_run


def look(run: Path | None, rows: int = 16) -> Diagnosis:
    return examine(run, rows, "cpu", Silent(), pytest.fail)


def test_a_run_is_examined_with_text_of_its_data_set(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    prepared(tmp_path / "data", tmp_path / "run" / "tokenizer.json")
    found = look(tmp_path / "run")
    assert found.facts["text"] == "held out"
    assert {finding.name for finding in found.findings} == {
        "replaced_fraction",
        "discriminator_recall",
        "discriminator_auc",
        "generator_loss_share",
        "discriminator_loss_share",
        "embedding_gradient_cosine",
        "embedding_gradient_ratio",
        "duplicate_fraction",
        "embedding_norm_drift",
    }
    assert all(finding.cause for finding in found.findings)
    assert all(finding.knob for finding in found.findings if finding.verdict in ("low", "high"))
    assert look(tmp_path / "run") == found


@pytest.mark.usefixtures("unverified")
def test_a_masked_language_model(tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=["objective.name=mlm"])
    data = prepared(tmp_path / "data", tmp_path / "run" / "tokenizer.json")
    (tmp_path / "run" / COUNTS_FILE).write_text(counts_text(TokenData.open(data)))
    findings = look(tmp_path / "run").findings
    names = {finding.name: finding.value for finding in findings}
    (gain,) = (finding for finding in findings if finding.name == "mlm_gain")
    assert gain.verdict == "low"  # its weights are noise
    assert "the word frequencies alone would give" in gain.cause
    assert names["embedding_gradient_cosine"] is None
    assert "discriminator_recall" not in names


def test_without_its_data_set_only_the_weights_are_looked_at(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    warnings: list[str] = []
    found = examine(tmp_path / "run", 16, "cpu", Silent(), warnings.append)
    assert [finding.name for finding in found.findings] == ["duplicate_fraction", "embedding_norm_drift"]
    assert "only the weights were examined" in warnings[0]


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run"):
        look(tmp_path)


def test_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    for path in sorted((tmp_path / "run" / "checkpoints").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        look(tmp_path / "run")


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    doctor(None, json_output=True)
    shown = json.loads(capsys.readouterr().out)
    names = {finding["name"] for finding in shown["findings"]}
    assert {"threads", "cpu_kernels", "free_disk_bytes"} <= names
    assert shown["torch"]
    assert {finding["verdict"] for finding in shown["findings"]} <= {"fine", "low", "high"}
    doctor(None)
    assert "usually 2.0 GiB or more" in capsys.readouterr().out


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run")
    prepared(tmp_path / "data", tmp_path / "run" / "tokenizer.json")
    for extra in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["discern", "doctor", str(tmp_path / "run"), "--sequences", "8", *extra])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in ("replaced_fraction", "discriminator_recall", "embedding_gradient_cosine"))
    assert json.loads(shown)["step"] == 20


@pytest.mark.usefixtures("unverified")
def test_a_run_that_has_hardly_begun_is_not_judged_as_if_it_were_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", overrides=["train.max_steps=22000", "objective.name=mlm"], step=209)
    data = prepared(tmp_path / "data", tmp_path / "run" / "tokenizer.json")
    (tmp_path / "run" / COUNTS_FILE).write_text(counts_text(TokenData.open(data)))
    (gain,) = (finding for finding in look(tmp_path / "run").findings if finding.name == "mlm_gain")
    assert (gain.verdict, gain.knob) == ("unknown", "")
    assert gain.cause.startswith("too early to tell at step 209")
    doctor(tmp_path / "run", sequences=16, device="cpu")
    said = capsys.readouterr().out
    assert "at step 209 of 22,000" in said
    assert "it is too early to tell" in said.splitlines()[0]
    limits = ["train.max_steps=22000", "train.max_hours=0.01", "objective.name=mlm"]
    make_run(tmp_path / "timed" / "run", overrides=limits, step=209, metrics=[{"step": 209, "seconds": 36.1}])
    prepared(tmp_path / "timed" / "data", tmp_path / "timed" / "run" / "tokenizer.json")
    found = look(tmp_path / "timed" / "run")
    assert found.subject.endswith("at step 209, when its time was used")
    assert not any(finding.cause.startswith("too early") for finding in found.findings)


def test_a_cuda_build_without_a_gpu_is_told_how_to_become_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert CPU_TORCH in look(None).facts["torch_build"]
    monkeypatch.setattr("torch.version.cuda", None)
    assert "torch_build" not in look(None).facts


def test_looking_at_files_and_accepting_them_are_two_things(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(SystemExit) as left:
        doctor(tmp_path / "run", files=True, accept=True)
    assert left.value.code == 2
    assert "--files and --accept are both given" in capsys.readouterr().err
