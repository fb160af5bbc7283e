"""Compare the prediction speed of a fine-tuned model in discern, transformers and onnxruntime, alternately in one run.

    OMP_NUM_THREADS=2 python benchmarks/predict.py OUT [--data SST-2/dev.tsv] [--repeats 5] [--copies 1]

OUT is a model that `discern finetune` trained on single texts. All sides tokenize, run the network and compute probabilities:
discern like `discern predict`, the others in batches of 32 in the order of the file, padded to the longest row. transformers runs
in float32 and in bfloat16 autocast, each also compiled; onnxruntime runs what `discern export --onnx` writes. Prints Markdown,
with the largest difference of a probability from that of transformers in float32.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from discern import export
from discern.model_files.finetuned import FinetunedFolder
from discern.tasks.base import ClassificationExample
from discern.tasks.classification import ClassificationConfig
from discern.tasks.named import TASKS
from discern.tasks.supervised import outputs_of

BATCH, BLOCK = 32, 2048
Inputs = Mapping[str, torch.Tensor]
Logits = Callable[[Inputs], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("DISCERN_TEST_DATA", ".")) / "glue/SST-2/dev.tsv")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--copies", type=int, default=1, help="number of copies of the file to predict")
    arguments = parser.parse_args()
    examples = list(TASKS["sst2"].read(arguments.data, "dev", ClassificationConfig()).examples) * arguments.copies
    with tempfile.TemporaryDirectory() as folder:
        sides = {f"discern, {name}": ours(arguments.model, examples, name) for name in ("float32", "bfloat16")}
        sides |= theirs(Path(export(arguments.model, out=Path(folder) / "export", onnx=True)["out"]), examples)
    said = {name: run() for name, run in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.repeats):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    reference = "transformers, float32"
    columns = "examples/s | seconds, least to most | ratio to discern, float32 | to discern, bfloat16 | largest difference"
    print(f"| | {columns} |\n|---|---|---|---|---|---|")
    for name, times in seconds.items():
        ratios = [statistics.median(b / a for a, b in zip(seconds[our], times, strict=True)) for our in list(sides)[:2]]
        cells = [name, f"{len(examples) / statistics.median(times):,.0f}", f"{min(times):.2f} to {max(times):.2f}"]
        cells += [*(f"{ratio:.2f}" for ratio in ratios), f"{(said[name] - said[reference]).abs().max():.1e}"]
        print(f"| {' | '.join(cells)} |")
    print(f"\n{torch.get_num_threads()} threads, {len(examples):,} examples; a ratio of 2: discern takes half the time")


def ours(model: Path, examples: list[ClassificationExample], precision: str) -> Callable[[], torch.Tensor]:
    loaded = FinetunedFolder(model).task_model()
    (task,) = loaded.objective.tasks.values()

    def run() -> torch.Tensor:
        found = []
        for start in range(0, len(examples), BLOCK):
            block = examples[start : start + BLOCK]
            features = task.encode(block, loaded.text, labeled=False)
            outputs, _ = outputs_of(loaded.objective, task.name, features, precision=precision)
            found += [list(each["probabilities"].values()) for each in task.predict(block, features, outputs)]
        return torch.tensor(found)

    return run


def theirs(exported: Path, examples: list[ClassificationExample]) -> dict[str, Callable[[], torch.Tensor]]:
    network = AutoModelForSequenceClassification.from_pretrained(exported).eval()
    compiled = torch.compile(network, dynamic=True)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(exported / "model.onnx", options)
    names = [each.name for each in session.get_inputs()]

    def autocast(model: Any) -> Logits:
        def run(inputs: Inputs) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                logits: torch.Tensor = model(**inputs).logits
            return logits.float()

        return run

    sides: dict[str, Logits] = {
        "transformers, float32": lambda inputs: network(**inputs).logits,
        "transformers, bfloat16": autocast(network),
        "transformers, float32, compiled": lambda inputs: compiled(**inputs).logits,
        "transformers, bfloat16, compiled": autocast(compiled),
        "onnxruntime, float32": lambda inputs: torch.from_numpy(
            session.run(["logits"], {name: inputs[name].numpy() for name in names})[0]
        ),
    }
    texts = [example.text for example in examples]

    @torch.inference_mode()
    def run(logits: Logits) -> torch.Tensor:
        found = []
        for start in range(0, len(texts), BATCH):
            inputs = tokenizer(texts[start : start + BATCH], truncation=True, padding=True, return_tensors="pt")
            found.append(logits(inputs).softmax(-1))
        return torch.cat(found)

    return {name: partial(run, logits) for name, logits in sides.items()}


if __name__ == "__main__":
    main()
