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
from discern.model_files.hub import hub_name, local_model
from discern.model_files.teacher import Teacher
from discern.progress import Progress
from discern.tasks.base import TextEncoder
from discern.tasks.classification import PREDICTED
from discern.tasks.supervised import Split


def teach(data: TaskData, text: TextEncoder, finetune: FinetuneSection, device: torch.device, progress: Progress) -> TaskData:
    """Add the teacher's outputs to the targets of the rows to train on, and the texts of `finetune.unlabeled` with its labels.

    Raises:
        ConfigError: the task cannot be taught, or the teacher predicts other labels.
        DataError, CheckpointError: the teacher or the texts cannot be read.
    """
    task, labels, layout = data.task, data.task.labels, data.definition.layout
    if labels.kind not in PREDICTED:
        raise ConfigError(
            "finetune.teacher is for classes and numbers",
            hint="let the teacher label texts by `discern predict TEACHER TEXTS --append --out labeled.csv`, and train on these",
        )
    unlabeled: tuple[Any, ...] = ()
    if finetune.unlabeled is not None:
        table = open_table(finetune.unlabeled, header=layout.header, verbatim=layout.verbatim)
        if table.format == "text" and not labels.pairs:
            layout = layout.with_columns({"text": "text"})
        unlabeled = tuple(data.definition.family.rows(table, layout))
    headline, labeled = data.evaluated[data.dev_name].examples, data.train.examples
    folder = local_model(str(finetune.teacher), progress.note)
    teacher = Teacher(folder, task, progress)
    predictions, states = teacher.outputs((*headline, *labeled, *unlabeled), device, progress)

    # Its score, to compare with; then the labels of the further texts.
    judged, of_rows = predictions[: len(headline)], predictions[len(headline) :]
    score = task.score(headline, judged).values[task.metrics[0]]
    progress.note(f"{task.name}: the teacher: {task.metrics[0]} {score:.4f} on {data.dev_name}")
    values = [prediction[PREDICTED[labels.kind]] for prediction in of_rows]
    labels_of_unlabeled = [tuple(value) if labels.kind == "multi" else value for value in values[len(labeled) :]]
    taught = tuple(replace(example, label=label) for example, label in zip(unlabeled, labels_of_unlabeled, strict=True))

    # Its outputs in the order and the unit of the student's.
    order = [teacher.task.labels.names.index(name) for name in labels.names]
    outputs = [[each["logits"][number] for number in order] for each in of_rows]
    if labels.kind == "number":
        outputs = [[(value - labels.shift) / labels.scale] for value in values]
    features = task.encode((*labeled, *taught), text, labeled=True)
    targets = {**features.targets, "teacher": np.array(outputs, np.float32)}
    if finetune.teacher_states_weight:
        targets["teacher_state"] = states[len(headline) :]
    about = {"model": hub_name(folder) or folder.name, "weights": teacher.fingerprint, "score": score}
    return replace(data, train=Split(labeled, replace(features, targets=targets)), taught=taught, teacher=about)
