"""`discern doctor`: of a run, of a run whose data set is gone, and of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import discern
from discern.data.dataset.shards import TokenData
from discern.doctor.checks import CPU_TORCH, examine
from discern.errors import CheckpointError, ConfigError, DataError
from discern.model_files.run import COUNTS_FILE, counts_text
from discern.progress import Silent
from tests.pretraining.test_evaluate import prepared
from tests.small.run import make_run
from tests.support import run_discern


def look(run: Path | None) -> dict[str, Any]:
    return examine(run, 16, "cpu", Silent(), pytest.fail)


def with_text(folder: Path, *overrides: str, **options: Any) -> Path:
    """A run with its data set."""
    make_run(folder / "run", overrides=[*overrides], **options)
    data = prepared(folder / "data", folder / "run" / "tokenizer.json")
    (folder / "run" / COUNTS_FILE).write_text(counts_text(TokenData.open(data)))
    return folder / "run"


@pytest.mark.usefixtures("unverified")
def test_a_run_is_examined_with_text_of_its_data_set(tmp_path: Path) -> None:
    run = with_text(tmp_path)
    found = look(run)
    assert (found["step"], found["text"]) == (20, "held out")
    names = {finding["name"] for finding in found["findings"]}
    assert names >= {"replaced_fraction", "discriminator_recall", "embedding_gradient_cosine", "embedding_norm_drift"}
    assert all(finding["knob"] for finding in found["findings"] if finding["verdict"] in ("low", "high"))
    assert look(run) == found
    shown = run_discern("doctor", run, "--sequences", 16, "--device", "cpu").stdout
    assert all(finding["name"] in shown for finding in found["findings"])


@pytest.mark.usefixtures("unverified")
def test_a_masked_language_model(tmp_path: Path) -> None:
    findings = {finding["name"]: finding for finding in look(with_text(tmp_path, "objective.name=mlm"))["findings"]}
    assert findings["mlm_gain"]["verdict"] == "low"  # its weights are noise
    assert "the word frequencies alone would give" in findings["mlm_gain"]["cause"]
    assert "discriminator_recall" not in findings


def test_without_its_data_set_only_the_weights_are_looked_at(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    warnings: list[str] = []
    found = examine(tmp_path / "run", 16, "cpu", Silent(), warnings.append)
    assert [finding["name"] for finding in found["findings"]] == ["duplicate_fraction", "embedding_norm_drift"]
    assert "only the weights were examined" in warnings[0]


def test_no_run_and_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run"):
        look(tmp_path)
    make_run(tmp_path / "run")
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        look(tmp_path / "run")


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    shown = json.loads(run_discern("doctor", "--json").stdout)
    assert {"threads", "cpu_kernels", "free_disk_bytes"} <= {finding["name"] for finding in shown["findings"]}
    assert CPU_TORCH in shown["torch_build"], "a CUDA build without a GPU is told how to become smaller"
    monkeypatch.setattr("torch.version.cuda", None)
    out = run_discern("doctor").stdout
    assert "usually 2.0 GiB or more" in out
    assert "torch_build" not in out


@pytest.mark.usefixtures("unverified")
def test_a_run_that_has_hardly_begun_is_not_judged_as_if_it_were_finished(tmp_path: Path) -> None:
    found = look(with_text(tmp_path / "long", "train.max_steps=22000", "objective.name=mlm", step=209))
    (gain,) = (finding for finding in found["findings"] if finding["name"] == "mlm_gain")
    assert (gain["verdict"], gain["knob"], gain["early"]) == ("unknown", "", True)
    assert gain["cause"].startswith("too early to tell at step 209")
    assert found["subject"].endswith("at step 209 of 22,000")
    limits = ("train.max_steps=22000", "train.max_hours=0.01", "objective.name=mlm")
    found = look(with_text(tmp_path / "timed", *limits, step=209, metrics=[{"step": 209, "seconds": 36.1}]))
    assert found["subject"].endswith("at step 209, when its time was used")
    assert not any(finding["early"] for finding in found["findings"])


def test_looking_at_files_and_accepting_them_are_two_things(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="files cannot be combined with accept"):
        discern.doctor(tmp_path, files=True, accept=True)
