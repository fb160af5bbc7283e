"""Compare the prediction speed of a fine-tuned model in discern and in transformers, alternately in one run.

    OMP_NUM_THREADS=2 python benchmarks/predict.py OUT [--data SST-2/dev.tsv] [--repeats 5] [--copies 1]

OUT is a model that `discern finetune` trained on single texts. Both sides tokenize, run the network in float32 and compute
probabilities: discern like `discern predict`, transformers in batches of 32 in the order of the file, padded to the longest row.
The largest difference between the probabilities is also printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from discern.model_files.finetuned import FinetunedFolder
from discern.progress import Silent
from discern.tasks.base import ClassificationExample
from discern.tasks.classification import ClassificationConfig
from discern.tasks.named import TASKS
from discern.tasks.supervised import outputs_of

BATCH, BLOCK = 32, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("DISCERN_TEST_DATA", ".")) / "glue/SST-2/dev.tsv")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--copies", type=int, default=1, help="number of copies of the file to predict")
    arguments = parser.parse_args()
    examples = list(TASKS["sst2"].read(arguments.data, "dev", ClassificationConfig()).examples) * arguments.copies
    sides = {"discern": ours(arguments.model, examples), "transformers": theirs(arguments.model, examples)}
    said = {name: run() for name, run in sides.items()}
    print(f"largest difference of a probability: {(said['discern'] - said['transformers']).abs().max():.1e}")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.repeats):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    for name, times in seconds.items():
        print(f"{name:<13} {len(examples) / statistics.median(times):8,.0f} examples/s  ({min(times):.2f} to {max(times):.2f} s)")
    ratios = [theirs / ours for ours, theirs in zip(seconds["discern"], seconds["transformers"], strict=True)]
    print(f"median ratio {statistics.median(ratios):.2f}, {torch.get_num_threads()} threads, {len(examples):,} examples")


def ours(model: Path, examples: list[ClassificationExample]) -> Callable[[], torch.Tensor]:
    loaded = FinetunedFolder(model).task_model()
    (task,) = loaded.objective.tasks.values()

    def run() -> torch.Tensor:
        found = []
        for start in range(0, len(examples), BLOCK):
            block = examples[start : start + BLOCK]
            features = task.encode(block, loaded.text, labeled=False)
            outputs, _ = outputs_of(loaded.objective, task.name, features)
            found += [list(each["probabilities"].values()) for each in task.predict(block, features, outputs)]
        return torch.tensor(found)

    return run


def theirs(model: Path, examples: list[ClassificationExample]) -> Callable[[], torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        out = export_task(model, out=Path(folder) / "export", progress=Silent()).folder
        network = AutoModelForSequenceClassification.from_pretrained(out).eval()
        tokenizer = AutoTokenizer.from_pretrained(out)
    texts = [example.text for example in examples]

    @torch.inference_mode()
    def run() -> torch.Tensor:
        found = []
        for start in range(0, len(texts), BATCH):
            inputs = tokenizer(texts[start : start + BATCH], truncation=True, padding=True, return_tensors="pt")
            found.append(network(**inputs).logits.softmax(-1))
        return torch.cat(found)

    return run


if __name__ == "__main__":
    main()
