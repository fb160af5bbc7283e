"""Runs whose objective remembers: stopped and resumed, accumulated, and saved with what was remembered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from discern.data.batching.rows import heldout_rows, training_rows
from discern.data.config import DataConfig
from discern.objectives.permutation_lm import PermutationLanguageModel, PermutationLMConfig
from discern.progress import Silent
from discern.training import checkpoint
from discern.training.config import OptimizerConfig, TrainConfig
from discern.training.distributed import Ranks
from discern.training.loop import train
from discern.training.metrics import MetricsLog, read_metrics
from discern.training.process import StopRequest
from discern.training.state import State, TrainContext
from tests.support import MODELS, SPECIAL, MemorySplit, random_documents, settings

SPLIT = MemorySplit(random_documents(60, 50, seed=3), begins=lambda token: token % 3 != 0)
DATA = DataConfig(sequence_length=24, packing="two-part")
SLOTS = 8


def build(dropout: float = 0.1) -> PermutationLanguageModel:
    model = {"hidden_dropout": dropout, "attention_dropout": dropout, **MODELS["permutation-lm"]}
    objective = PermutationLanguageModel(PermutationLMConfig(memory_length=20), settings(**model))
    objective.initialize(0)
    return objective


def context(folder: Path, objective: PermutationLanguageModel, **options: Any) -> TrainContext:
    folder.mkdir(exist_ok=True)
    defaults = {"max_steps": 9, "checkpoint_every_steps": 3, "log_every_steps": 1, "evaluate_every_steps": 2}
    return TrainContext(
        objective=objective,
        source=training_rows(SPLIT, SPECIAL, DATA, 0, slots=SLOTS),
        heldout=heldout_rows(SPLIT, SPECIAL, DATA),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=4),
        train=TrainConfig(**(defaults | {"sequences_per_step": SLOTS, "evaluate_sequences": 6} | options)),
        ranks=Ranks(0, 1, torch.device("cpu")),
        precision="float32",
        folder=folder,
        metrics_log=MetricsLog(folder, 0),
        progress=Silent(),
        stop=StopRequest(),
    )


def everything(objective: PermutationLanguageModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in (checkpoint.model_tensors(objective) | objective.carry_state()).items()}


def test_a_resumed_run_remembers_what_it_did_bit_for_bit(tmp_path: Path) -> None:
    whole = build()
    train(context(tmp_path / "whole", whole), State())
    first = context(tmp_path / "cut", build(), max_steps=9)
    first.stop.signal = 15
    train(first, State())
    contents = checkpoint.load_newest(tmp_path / "cut" / "checkpoints", pytest.fail)
    assert contents is not None
    assert contents.step == 1
    assert sorted(contents.carry) == [f"memory.slot{slot}" for slot in range(SLOTS)]
    second = build()
    second.initialize(7)
    checkpoint.load_model_tensors(second, contents.model, "here")
    second.load_carry_state(contents.carry)
    train(context(tmp_path / "cut", second), State.from_checkpoint(contents))
    expected, resumed = everything(whole), everything(second)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_accumulation_changes_nothing(tmp_path: Path) -> None:
    whole, split = build(0.0), build(0.0)
    train(context(tmp_path / "whole", whole), State())
    train(context(tmp_path / "split", split, micro_batch_size=2), State())
    records = [read_metrics(tmp_path / name)[0] for name in ("whole", "split")]
    assert records[0]["loss"] == pytest.approx(records[1]["loss"], rel=1e-6)
    assert records[0]["grad_norm"] == pytest.approx(records[1]["grad_norm"], rel=1e-5)
    for name, tensor in everything(whole).items():
        torch.testing.assert_close(everything(split)[name], tensor, rtol=0, atol=1e-5 if "memory" not in name else 1e-4)


def test_evaluations_in_between_change_nothing(tmp_path: Path) -> None:
    often, never = build(), build()
    train(context(tmp_path / "often", often, max_steps=3, evaluate_every_steps=1), State())
    train(context(tmp_path / "never", never, max_steps=3, evaluate_every_steps=0), State())
    assert all(torch.equal(tensor, everything(never)[name]) for name, tensor in everything(often).items())
