"""What a teacher predicts: a fine-tuned model of discern, or any sequence classifier that transformers loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from discern.errors import CheckpointError, ConfigError, DataError
from discern.model_files.folder import open_model
from discern.model_files.hub import CONFIG_NAME
from discern.model_files.huggingface import PROBLEMS
from discern.models.base import encoders_by_type
from discern.models.heads import mean_state
from discern.progress import Progress
from discern.storage.checksums import has_file, read_json
from discern.tasks.base import ClassificationExample, Labels, Outputs, Prediction
from discern.tasks.classification import Classification, ClassificationConfig
from discern.tasks.supervised import outputs_of, refuse_non_finite

_BATCH, _MAX_LENGTH = 64, 512


def teacher_outputs(
    folder: Path, name: str, examples: Sequence[ClassificationExample], device: torch.device, progress: Progress
) -> tuple[Labels, list[Prediction], NDArray[np.float32]]:
    """The labels of a teacher, and its prediction for each example with the mean state of its last layer, (N, D).

    Args:
        name: name of the task, if the teacher has several.

    Raises:
        ConfigError: transformers is needed and not installed.
        DataError, CheckpointError: the folder has no fine-tuned model, or is damaged.
    """
    progress.start("asking the teacher", len(examples), "texts")
    features: Any = None  # which predictions of classes and numbers do not need
    hint = "give a complete model folder"
    is_export = has_file(folder, CONFIG_NAME)
    if is_export and read_json(folder / CONFIG_NAME, hint=hint, error=CheckpointError)["model_type"] not in encoders_by_type():
        task, outputs = _of_transformers(folder, examples, device, progress)
    else:
        model = open_model(folder, warn=progress.note).task_model()
        found = model.task(name if name in model.objective.tasks else None)
        if not isinstance(found, Classification):
            raise DataError(f"{folder} predicts neither classes nor numbers", hint="give a classifier as the teacher")
        task = found
        model.objective.to(device).observes_states = True
        features = task.encode(examples, model.text, labeled=False)
        outputs, _ = outputs_of(model.objective, task.name, features, progress=progress)
    progress.finish()
    refuse_non_finite("the teacher", outputs, 0.0, hint="use another teacher")
    return task.labels, task.predict(examples, features, outputs), np.stack([output["state"] for output in outputs])


@torch.inference_mode()
def _of_transformers(
    folder: Path, examples: Sequence[ClassificationExample], device: torch.device, progress: Progress
) -> tuple[Classification, Outputs]:
    try:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
    except ImportError:
        raise ConfigError(f"{folder} is read by transformers", hint="pip install 'discern-nlp[hf]'") from None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, loading = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    if loading["missing_keys"]:
        raise DataError(f"{folder} is no classifier: it lacks {sorted(loading['missing_keys'])[0]}", hint="fine-tune it first")
    model.to(device).eval()
    names = tuple(model.config.id2label[number] for number in range(model.config.num_labels))
    problem = model.config.problem_type or PROBLEMS["number" if len(names) == 1 else "single"]
    kind = next(ours for ours, theirs in PROBLEMS.items() if theirs == problem)
    task = Classification("teacher", ClassificationConfig(), (), Labels(() if kind == "number" else names, kind))

    # Texts of similar length together.
    order = sorted(range(len(examples)), key=lambda number: len(examples[number].text) + len(examples[number].pair or ""))
    outputs: list[Any] = [None] * len(examples)
    for start in range(0, len(order), _BATCH):
        numbers = order[start : start + _BATCH]
        texts, pairs = [examples[number].text for number in numbers], [examples[number].pair for number in numbers]
        second = None if pairs[0] is None else pairs
        length = min(tokenizer.model_max_length, _MAX_LENGTH)
        batch = tokenizer(texts, second, padding=True, truncation=True, max_length=length, return_tensors="pt").to(device)
        output = model(**batch, output_hidden_states=True)
        state = mean_state(output.hidden_states[-1], batch["attention_mask"].bool())
        for row, number in enumerate(numbers):
            arrays = {"logits": output.logits[row], "state": state[row]}
            outputs[number] = {key: value.float().cpu().numpy().astype(np.float32) for key, value in arrays.items()}
        progress.advance(len(numbers))
    return task, outputs
