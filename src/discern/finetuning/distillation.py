"""Distillation: a teacher's outputs for the rows to train on, and for further texts, which it labels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from discern.data.tables import open_table
from discern.errors import ConfigError
from discern.finetuning.plan import TaskData
from discern.finetuning.settings import FinetuneSection
from discern.model_files.hub import local_model
from discern.model_files.teacher import teacher_outputs
from discern.progress import Progress
from discern.tasks.base import ClassificationExample, TextEncoder
from discern.tasks.classification import PREDICTED
from discern.tasks.supervised import Split


def teach(data: TaskData, text: TextEncoder, finetune: FinetuneSection, device: torch.device, progress: Progress) -> TaskData:
    """Add the teacher's outputs to the targets of the rows to train on, and the texts of `finetune.unlabeled` with its labels.

    Raises:
        ConfigError: the task cannot be taught, or the teacher predicts other labels.
        DataError, CheckpointError: the teacher or the texts cannot be read.
    """
    task, labels = data.task, data.task.labels
    if labels.kind not in PREDICTED:
        raise ConfigError(
            "finetune.teacher is for classes and numbers",
            hint="let the teacher label texts by `discern predict TEACHER TEXTS --append --out labeled.csv`, and train on these",
        )
    folder = local_model(str(finetune.teacher), progress.note)
    unlabeled: tuple[ClassificationExample, ...] = ()
    if finetune.unlabeled is not None:
        table = open_table(finetune.unlabeled, header=data.definition.layout.header, verbatim=data.definition.layout.verbatim)
        layout = data.definition.layout
        if table.format == "text" and not labels.pairs:
            layout = layout.with_columns({"text": "text"})
        unlabeled = tuple(data.definition.family.rows(table, layout))
    headline = data.evaluated[data.dev_name].examples
    labeled = data.train.examples
    teacher, outputs = teacher_outputs(folder, task.name, (*headline, *labeled, *unlabeled), device, progress)
    of_teacher = teacher.labels
    if of_teacher.kind != labels.kind or {*of_teacher.names} != {*labels.names}:
        described = [", ".join(each.names[:10]) or "a number" for each in (of_teacher, labels)]
        raise ConfigError(
            f"the teacher {folder} predicts {described[0]}, but '{task.name}' has {described[1]}",
            hint="use the same labels in both, or another teacher",
        )

    # Its score, to compare with; then the labels of the further texts.
    predictions = teacher.predict((*headline, *labeled, *unlabeled), data.train.features, outputs)
    score = task.score(headline, predictions[: len(headline)]).values[task.metrics[0]]
    progress.note(f"{task.name}: the teacher: {task.metrics[0]} {score:.4f} on {data.dev_name}")
    predicted = predictions[len(headline) + len(labeled) :]

    def label(prediction: dict[str, Any]) -> Any:
        value = prediction[PREDICTED[labels.kind]]
        return tuple(value) if labels.kind == "multi" else value

    taught = tuple(replace(example, label=label(each)) for example, each in zip(unlabeled, predicted, strict=True))
    features = task.encode((*labeled, *taught), text, labeled=True)
    logits = np.stack([each["logits"] for each in outputs[len(headline) :]])
    if labels.kind == "number":
        logits = (of_teacher.scale * logits + of_teacher.shift - labels.shift) / labels.scale
    else:
        logits = logits[:, [of_teacher.names.index(name) for name in labels.names]]
    states = np.stack([each["state"] for each in outputs[len(headline) :]])
    targets = {**features.targets, "teacher": logits.astype(np.float32), "teacher_state": states.astype(np.float32)}
    train, about = Split(labeled, replace(features, targets=targets)), {"model": folder.name, "score": score}
    return replace(data, train=train, taught=taught, teacher=about)
