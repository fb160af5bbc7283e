"""The step of fine-tuning as a GPU runs it: the host never waits in it, and it attends without padding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from discern import kernels
from discern.models.base import build_embeddings, build_encoder
from discern.models.config import build_config
from discern.objectives.base import Phase
from discern.pretraining.bench import META, meta_step
from discern.progress import Silent
from discern.tasks.base import Labels, Task
from discern.tasks.classification import Classification, ClassificationConfig
from discern.tasks.features import Features, Ragged, TaskStream
from discern.tasks.questions import QuestionConfig, Squad2Questions
from discern.tasks.supervised import SupervisedObjective
from discern.tasks.tagging import Tagging, TaggingConfig
from discern.training.config import OptimizerConfig, TrainConfig
from discern.training.distributed import Ranks
from discern.training.prefetch import read_local_batch, read_onto_device
from discern.training.process import StopRequest
from discern.training.state import TrainContext
from discern.types import with_spans
from tests.models.test_unpadding import plain
from tests.training.no_waits import no_waits

VOCABULARY, ROWS = 50, 24
CPU = torch.device("cpu")


def classes(kind: Any = "single", names: int = 3, **settings: Any) -> Task[Any]:
    labels = Labels(tuple(map(str, range(names))), kind, pairs=True)
    return Classification("task", ClassificationConfig(**settings), ("accuracy",), labels)


def questions(head: str) -> Task[Any]:
    labels = Labels(("answerable", "impossible"), "spans")
    return Squad2Questions("task", QuestionConfig(head=head), ("f1",), labels)  # type: ignore[arg-type]


def tagger() -> Task[Any]:
    return Tagging("task", TaggingConfig(), ("accuracy",), Labels(("O", "A"), kind="tags"))


TASKS: dict[str, dict[str, Task[Any]]] = {
    "classes": {"task": classes(head="dense")},
    "balanced classes of pairs": {"task": classes(pooling="pair")},
    "means": {"task": classes(pooling="mean", head="prediction")},
    "several classes": {"task": classes("multi")},
    "numbers": {"task": classes("number", 0)},
    "tags": {"task": tagger()},
    "joint answers": {"task": questions("joint")},
    "answers": {"task": questions("span")},
    "two tasks": {"one": classes(), "other": tagger()},
}


def features(task: Task[Any]) -> Features:
    """Rows of two texts of various lengths, with the targets of the task."""
    rng = np.random.default_rng(0)
    words = rng.integers(2, 12, (ROWS, 2))
    ids = [
        [2, *rng.integers(5, VOCABULARY, one).tolist(), 3, *rng.integers(5, VOCABULARY, two).tolist(), 3] for one, two in words
    ]
    types = [[0] * (one + 2) + [1] * (two + 1) for one, two in words]
    tags = Ragged.of([[-100, *rng.integers(0, 2, len(row) - 2).tolist(), -100] for row in ids], np.int64)
    targets: dict[str, Any] = {
        "single": {"class": rng.integers(0, 3, ROWS)},
        "multi": {"classes": rng.integers(0, 2, (ROWS, 3)).astype(np.float32)},
        "number": {"score": rng.random(ROWS).astype(np.float32)},
        "tags": {"tags": tags},
        "spans": {"start": words[:, 0] + 2, "end": words[:, 0] + 3, "impossible": np.zeros(ROWS, np.float32)},
    }
    return Features(Ragged.of(ids), Ragged.of(types, np.uint8), np.arange(ROWS), targets[task.labels.kind])


def context(name: str, encoder: str, device: torch.device, **train: Any) -> TrainContext:
    sizes = {"num_layers": 2, "hidden_size": 32, "embedding_size": 32, "num_heads": 2, "feedforward_size": 24}
    config = build_config({"encoder": encoder, "attention_dropout": 0.0, "hidden_dropout": 0.0, **sizes})
    network = build_encoder(build_embeddings(VOCABULARY, 32, config), config)
    frame = "cls-last" if encoder == "xlnet" else "cls-first"
    objective = SupervisedObjective(network, TASKS[name], dropout=0.0, frame=frame)  # type: ignore[arg-type]
    objective.initialize(0)
    return TrainContext(
        objective=objective.to(device),
        source=TaskStream({task: features(each) for task, each in TASKS[name].items()}, 0, 8),
        heldout=None,
        optimizer=OptimizerConfig(layer_decay=0.8),
        train=TrainConfig(**({"max_steps": 20, "sequences_per_step": 8} | train)),
        ranks=Ranks(0, 1, device),
        precision="bfloat16" if device == META else "float32",
        folder=Path(),
        metrics_log=None,
        progress=Silent(),
        stop=StopRequest(),
    )


CASES = [(name, "bert") for name in TASKS] + [("classes", "modernbert"), ("classes", "xlnet")]


@pytest.mark.parametrize(("name", "encoder"), CASES)
def test_the_host_never_waits_in_a_step(name: str, encoder: str) -> None:
    run = context(name, encoder, META)
    meta_step(run, Phase("fine-tuning", 20), around=no_waits())


@pytest.mark.parametrize("name", ["balanced classes of pairs", "tags", "joint answers", "two tasks"])
@pytest.mark.parametrize("encoder", ["bert", "modernbert"])
def test_rows_without_padding_give_the_losses_of_padded_ones(name: str, encoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = Mock(side_effect=plain)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attention)
    run = context(name, encoder, CPU)
    ((batch, randomness),) = read_local_batch(run, 0).micro_batches
    with kernels.switched_off():
        padded, unpadded = (
            run.objective(each, randomness).terms for each in (batch, replace(batch, tokens=with_spans(batch.tokens)))
        )
    assert attention.call_count == 2, "one call per layer"
    for term, loss in padded.items():
        assert unpadded[term].count == loss.count
        torch.testing.assert_close(unpadded[term].total, loss.total, rtol=1e-5, atol=1e-5)


def test_the_batch_of_a_gpu_has_counts_and_spans() -> None:
    run = context("tags", "bert", CPU)
    local = read_onto_device(run, 0, META, spans=True, pin=False)
    ((here, _),), ((there, _),) = local.micro_batches, local.on_device
    assert here.tokens.spans is not None
    assert there.tokens.spans is not None
    assert there.tokens.input_ids.is_meta
    assert [group.count for group in there.tokens.groups] == [run.objective.counts(here)["task"]]  # type: ignore[attr-defined]
    assert all(group.rows.is_meta for group in there.tokens.groups)  # type: ignore[attr-defined]
