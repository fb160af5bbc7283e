"""The step of fine-tuning as a GPU runs it: the host never waits in it, and it attends without padding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from discern import kernels
from discern.models.base import build_embeddings, build_encoder
from discern.models.config import build_config
from discern.objectives.base import Phase
from discern.pretraining.bench import META, meta_step
from discern.progress import Silent
from discern.tasks.base import Labels, Task
from discern.tasks.classification import Classification, ClassificationConfig
from discern.tasks.features import Features, Ragged, TaskStream
from discern.tasks.questions import QuestionConfig
from discern.tasks.squad import Squad2Questions
from discern.tasks.supervised import SupervisedObjective
from discern.tasks.tagging import Tagging, TaggingConfig
from discern.training.config import OptimizerConfig, TrainConfig
from discern.training.distributed import Ranks
from discern.training.interrupt import StopRequest
from discern.training.prefetch import read_local_batch, read_onto_device
from discern.training.state import TrainContext
from discern.types import with_spans
from tests.models.test_unpadding import plain
from tests.training.no_waits import WaitsError, no_waits

VOCABULARY, ROWS = 50, 24
CPU = torch.device("cpu")


def classes(kind: Any = "single", names: int = 3, **settings: Any) -> Task[Any]:
    labels = Labels(tuple(map(str, range(names))), kind, pairs=True)
    return Classification("task", ClassificationConfig(**settings), ("accuracy",), labels)


def questions(head: str) -> Task[Any]:
    labels = Labels(("answerable", "impossible"), "spans")
    return Squad2Questions("task", QuestionConfig(head=head), ("f1",), labels)  # type: ignore[arg-type]


TASKS: dict[str, dict[str, Task[Any]]] = {
    "classes": {"task": classes(head="dense")},
    "balanced classes of pairs": {"task": classes(pooling="pair")},
    "means": {"task": classes(pooling="mean", head="prediction")},
    "several classes": {"task": classes("multi")},
    "numbers": {"task": classes("number", 0)},
    "tags": {"task": Tagging("task", TaggingConfig(), ("accuracy",), Labels(("O", "A"), kind="tags"))},
    "joint answers": {"task": questions("joint")},
    "answers": {"task": questions("span")},
    "two tasks": {
        "one": classes(),
        "other": Tagging("other", TaggingConfig(), ("accuracy",), Labels(("O", "A"), kind="tags")),
    },
}


def features(task: Task[Any]) -> Features:
    """Rows of two texts of various lengths, with the targets of the task."""
    rng = np.random.default_rng(0)
    words = rng.integers(2, 12, (ROWS, 2))
    ids = [
        [2, *rng.integers(5, VOCABULARY, one).tolist(), 3, *rng.integers(5, VOCABULARY, two).tolist(), 3] for one, two in words
    ]
    types = [[0] * (one + 2) + [1] * (two + 1) for one, two in words]
    targets: dict[str, Any] = {}
    if task.labels.kind == "tags":
        targets["tags"] = Ragged.of([[-100, *rng.integers(0, 2, len(row) - 2).tolist(), -100] for row in ids], np.int64)
    elif task.labels.kind == "spans":
        targets = {"start": words[:, 0] + 2, "end": words[:, 0] + 3, "impossible": np.zeros(ROWS, np.float32)}
    elif task.labels.kind == "number":
        targets["score"] = rng.random(ROWS).astype(np.float32)
    elif task.labels.kind == "multi":
        targets["classes"] = rng.integers(0, 2, (ROWS, 3)).astype(np.float32)
    else:
        targets["class"] = rng.integers(0, 3, ROWS)
    return Features(Ragged.of(ids), Ragged.of(types, np.uint8), np.arange(ROWS), targets)


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


def test_items_that_are_counted_on_the_device_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the count on the host avoids: the words of a tagger, counted in the forward pass."""
    run = context("tags", "bert", META)
    tagger = TASKS["tags"]["task"]
    monkeypatch.setattr(SupervisedObjective, "_items", lambda objective, group: tagger.items(group))
    with pytest.raises((WaitsError, RuntimeError)):
        meta_step(run, Phase("fine-tuning", 20), around=no_waits())


@pytest.mark.parametrize("name", ["balanced classes of pairs", "tags", "joint answers", "two tasks"])
@pytest.mark.parametrize("encoder", ["bert", "modernbert"])
def test_rows_without_padding_give_the_losses_of_padded_ones(name: str, encoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen

    calls = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return plain(*args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn", counted)
    run = context(name, encoder, CPU)
    ((batch, randomness),) = read_local_batch(run, 0).micro_batches
    found = []
    with kernels.switched_off():
        for each in (batch, replace(batch, tokens=with_spans(batch.tokens))):
            terms = run.objective(each, randomness).terms
            found.append({term: (float(loss.total.detach()), loss.count) for term, loss in terms.items()})
    assert len(calls) == 2
    for term, (total, count) in found[0].items():
        assert found[1][term] == (pytest.approx(total, rel=1e-5), count)


def test_the_batch_of_a_gpu_has_counts_and_spans() -> None:
    run = context("tags", "bert", CPU)
    local = read_onto_device(run, 0, META, spans=True, pin=False)
    ((here, _),), ((there, _),) = local.micro_batches, local.on_device
    assert here.tokens.spans is not None
    assert there.tokens.spans is not None
    assert there.tokens.input_ids.is_meta
    assert [group.count for group in there.tokens.groups] == [run.objective.counts(here)["task"]]  # type: ignore[attr-defined]
    assert all(group.rows.is_meta for group in there.tokens.groups)  # type: ignore[attr-defined]
