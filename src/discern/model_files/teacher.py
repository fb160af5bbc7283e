"""A teacher: a fine-tuned model of discern, or any sequence classifier that transformers loads, whose outputs are learned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from discern.errors import ConfigError, DataError
from discern.model_files.folder import fingerprint_weights, open_model
from discern.model_files.hub import CONFIG_NAME
from discern.model_files.huggingface import PROBLEMS
from discern.models.architecture import MARK
from discern.models.heads import mean_state
from discern.progress import Progress
from discern.storage.checksums import has_file, read_json
from discern.tasks.base import ClassificationExample, Labels, Outputs, Prediction, Task
from discern.tasks.classification import Classification, ClassificationConfig
from discern.tasks.supervised import outputs_of, refuse_non_finite

_BATCH, _MAX_LENGTH = 64, 512


class Teacher:
    """A fine-tuned model that predicts what a task predicts.

    Attributes:
        task: its own task, whose labels may be in another order.
        fingerprint: SHA-256 of its weights.

    Raises:
        ConfigError: it predicts something else, or transformers is needed and not installed.
        DataError, CheckpointError: the folder has no fine-tuned model, or is damaged.
    """

    def __init__(self, folder: Path, taught: Task[Any], progress: Progress) -> None:
        self.task: Task[Any]
        self._tokenizer: Any = None
        self._ours: Any = None
        if has_file(folder, CONFIG_NAME) and MARK not in read_json(folder / CONFIG_NAME, hint="give a complete model folder"):
            self.task, self._model = self._from_transformers(folder)
        else:
            self._ours = open_model(folder, warn=progress.note).task_model()
            self.task = self._ours.task(taught.name if taught.name in self._ours.objective.tasks else None)
            self._model = self._ours.objective
            self._model.observes_states = True
        self.fingerprint = fingerprint_weights(self._model)
        theirs, ours = self.task.labels, taught.labels
        if theirs.kind != ours.kind or {*theirs.names} != {*ours.names}:
            labels = [", ".join(each.names[:10]) or f"labels of the kind '{each.kind}'" for each in (theirs, ours)]
            raise ConfigError(
                f"the teacher {folder} predicts {labels[0]}, but '{taught.name}' has {labels[1]}",
                hint="use the same labels in both; those of a Hugging Face model are in id2label of its config.json",
            )

    def outputs(
        self, examples: Sequence[ClassificationExample], device: torch.device, progress: Progress
    ) -> tuple[list[Prediction], NDArray[np.float32]]:
        """The prediction for each example, and the mean states of the last layer, (N, D)."""
        progress.start("asking the teacher", len(examples), "texts")
        self._model.to(device)
        features: Any = None  # which the predictions of classes and numbers don't need
        if self._ours is None:
            outputs = self._run_transformers(examples, device, progress)
        else:
            features = self.task.encode(examples, self._ours.text, labeled=False)
            outputs, _ = outputs_of(self._model, self.task.name, features, progress=progress)
        progress.finish()
        refuse_non_finite("the teacher", outputs, 0.0, hint="use another teacher")
        return self.task.predict(examples, features, outputs), np.stack([output["state"] for output in outputs])

    def _from_transformers(self, folder: Path) -> tuple[Task[Any], Any]:
        try:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        except ImportError:
            raise ConfigError(f"{folder} is read by transformers", hint="pip install 'discern-nlp[hf]'") from None
        try:
            model, loading = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
            self._tokenizer = tokenizer = AutoTokenizer.from_pretrained(folder)
        except Exception as problem:  # of many types
            reason = str(problem).strip().partition("\n")[0]
            raise DataError(f"transformers cannot load {folder}: {reason}", hint="give a complete model folder") from problem
        files = [name for name in tokenizer.vocab_files_names.values() if (folder / name).is_file()]
        if missing := [*sorted(loading["missing_keys"])[:1], *(() if files else ["its tokenizer"])]:
            raise DataError(
                f"{folder} is not a complete classifier: it lacks {missing[0]}", hint="fine-tune it, or copy it again"
            )
        # Decoders have no token for padding.
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id
        names = tuple(model.config.id2label[number] for number in range(model.config.num_labels))
        problem_type = model.config.problem_type or PROBLEMS["number" if len(names) == 1 else "single"]
        kind = next(ours for ours, theirs in PROBLEMS.items() if theirs == problem_type)
        labels = Labels(() if kind == "number" else names, kind)
        return Classification("teacher", ClassificationConfig(), (), labels), model.eval()

    @torch.inference_mode()
    def _run_transformers(self, examples: Sequence[ClassificationExample], device: torch.device, progress: Progress) -> Outputs:
        # Texts of similar length together.
        order = sorted(range(len(examples)), key=lambda number: len(examples[number].text) + len(examples[number].pair or ""))
        outputs: list[Any] = [None] * len(examples)
        positions = getattr(self._model.config, "max_position_embeddings", _MAX_LENGTH)
        length = min(self._tokenizer.model_max_length, positions, _MAX_LENGTH)
        for start in range(0, len(order), _BATCH):
            numbers = order[start : start + _BATCH]
            texts, pairs = [examples[number].text for number in numbers], [examples[number].pair for number in numbers]
            second = None if pairs[0] is None else pairs
            batch = self._tokenizer(texts, second, padding=True, truncation=True, max_length=length, return_tensors="pt").to(
                device
            )
            output = self._model(**batch, output_hidden_states=True)
            state = mean_state(output.hidden_states[-1], batch["attention_mask"].bool())
            for row, number in enumerate(numbers):
                arrays = {"logits": output.logits[row], "state": state[row]}
                outputs[number] = {key: value.float().cpu().numpy() for key, value in arrays.items()}
            progress.advance(len(numbers))
        return outputs
