"""The options of an export for those who serve the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from discern.artifacts.run import is_finetuned
from discern.convert.forms import Form
from discern.convert.sentence_transformers import VectorPooling
from discern.convert.serving import Labeled, Serving
from discern.finetuning.evaluate import labeled_examples
from discern.progress import Progress


def serving_of(
    model: Path,
    *,
    form: Form | None,
    sentence_transformers: bool,
    pooling: VectorPooling | None,
    normalize: bool,
    onnx: bool,
    int8: bool,
    max_loss: float | None,
    compare_on: Path | None,
    task: str | None,
    seed: int | None,
    progress: Progress,
) -> Serving:
    """The forms of an export, checked. The arguments are the options of `discern export`.

    Eight bits are compared with float32 on texts or, for a model that was fine-tuned to predict, on labeled examples: those of
    `compare_on`, or of the file that the fine-tuning was evaluated on.

    Raises:
        ConfigError: options contradict each other, or a package is missing.
        DataError: the file cannot be read.
    """
    serving = Serving(form, sentence_transformers, pooling, normalize, onnx, int8, max_loss, compare_on)
    serving.check()
    if not int8 or sentence_transformers or not is_finetuned(model):
        return serving
    labeled = labeled_examples(model, compare_on, task=task, seed=seed, progress=progress)
    return serving if labeled is None else replace(serving, texts=None, labeled=Labeled(*labeled))
