"""What is suggested next suits the device and what was just made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from discern.cli import outputs as next_steps
from discern.cli.outputs import after_export, after_finetune, after_prepare, after_pretrain, has_gpu


def test_without_a_gpu_nobody_is_sent_into_days_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_steps, "has_gpu", lambda: False)
    assert after_prepare(Path("my data")).splitlines() == [
        "next:",
        "  discern pretrain --preset modern-cpu --data 'my data' --out RUN",
    ]
    monkeypatch.setattr(next_steps, "has_gpu", lambda: True)
    assert "--preset gpu-minutes" in after_prepare(Path("data"))
    assert after_prepare(Path("data"), words=True).endswith("--set objective.masking=whole-word")


def test_text_for_a_model_that_there_is_goes_to_adapt(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert f"discern adapt {tmp_path} --data data --out RUN" in after_prepare(Path("data"), tokenizer=tmp_path)
    assert "discern pretrain" in after_prepare(Path("data"), tokenizer=tmp_path / "vocab.txt")


@pytest.mark.parametrize(
    ("objective", "verb"), [("rtd", "detect"), ("mlm", "fill"), ("electric", "score"), ("permutation-lm", "score")]
)
def test_a_run_is_tried_out_by_what_its_objective_can_do(tmp_path: Path, objective: str, verb: str) -> None:
    (tmp_path / "config.toml").write_text(f'[objective]\nname = "{objective}"\n')
    found = after_pretrain(tmp_path)
    tried = [name for name in ("detect", "fill", "score") if f"discern {name} " in found]
    assert tried == [verb]
    assert "discern evaluate" in found


@pytest.mark.parametrize(("documents", "evaluated"), [(3, True), (0, False)])
def test_a_run_without_held_out_text_is_not_evaluated(tmp_path: Path, documents: int, evaluated: bool) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"data": [str(tmp_path)]}))
    (tmp_path / "manifest.json").write_text(json.dumps({"splits": {"heldout": {"num_documents": documents}}}))
    assert ("discern evaluate" in after_pretrain(tmp_path)) == evaluated


def test_a_fine_tuned_model_is_applied_and_not_asked_for_replaced_tokens() -> None:
    found = after_finetune(Path("out"), ["rte", "cola"])
    assert "discern detect" not in found
    assert "  discern predict out FILE --task rte" in found.splitlines()
    assert "  discern report out" in found.splitlines()
    assert "--task" not in after_finetune(Path("out"), [])
    assert "discern finetune model" in after_export(Path("model"))


def test_paths_can_be_copied() -> None:
    assert "discern finetune 'my model'" in after_export(Path("my model"))
    assert "discern finetune ./-model" in after_export(Path("./-model"))


def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not has_gpu()
