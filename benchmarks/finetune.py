"""Compare fine-tuning speed on SST-2 with transformers' Trainer, in turns, so that load on the machine affects both alike.

    python benchmarks/finetune.py [--data glue/SST-2] [--tokenizer vocab.txt] [--rows 2000] [--rounds 3] [--precision float32]
        [--model FOLDER]

Both train the same weights (new, or those of a folder) on the same number of rows, with the same batch size,
learning rate, schedule, dropout and number of steps, and evaluate the whole dev set. The Trainer pads dynamically
(DataCollatorWithPadding); discern batches rows of similar length. Only the training is timed, without start-up and evaluation:
`train_runtime` of the Trainer, and the seconds of discern's loop. Prints Markdown. The Trainer needs `pip install accelerate`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

BATCH, RATE, LENGTH = 32, 3e-4, 128


def main() -> None:
    root = Path(os.environ.get("DISCERN_TEST_DATA", "."))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=root / "glue/SST-2")
    parser.add_argument("--tokenizer", type=Path, default=root / "vocab/bert-uncased-en.txt")
    parser.add_argument("--model", type=Path, help="an export or a Hugging Face folder, instead of fresh weights")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--peer", nargs=2, metavar=("MODEL", "SEED"), help=argparse.SUPPRESS)
    request = parser.parse_args()
    if request.peer:
        print(json.dumps(trainer(request.peer[0], int(request.peer[1]), request)))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = request.model or fresh_model(Path(folder) / "model", request.tokenizer)
        rounds: dict[str, list[dict[str, float]]] = {"transformers": [], "discern": []}
        for seed in range(request.rounds):
            rounds["transformers"].append(peer(model, seed))
            rounds["discern"].append(ours(model, seed, request, Path(folder) / f"out-{seed}"))
            for name, results in rounds.items():
                print(f"seed {seed}, {name}: {results[-1]}", file=sys.stderr, flush=True)
    print(
        f"| {request.rows:,} rows, {request.precision} | examples/s, median (least to most) | accuracy by seed |\n|---|---|---|"
    )
    for name, results in rounds.items():
        speeds = [result["examples_per_second"] for result in results]
        accuracies = ", ".join(f"{result['accuracy']:.3f}" for result in results)
        print(f"| {name} | {statistics.median(speeds):,.1f} ({min(speeds):,.1f} to {max(speeds):,.1f}) | {accuracies} |")
    speeds = {name: [result["examples_per_second"] for result in results] for name, results in rounds.items()}
    ratios = [one / other for one, other in zip(speeds["discern"], speeds["transformers"], strict=True)]
    print(f"\nmedian ratio {statistics.median(ratios):.2f}")


def fresh_model(folder: Path, tokenizer: Path) -> Path:
    """Write a randomly initialized ELECTRA-Small as a folder that both can load."""
    from transformers import ElectraConfig, ElectraModel

    from discern.data.tokenizer import load_tokenizer, vocab_size

    loaded = load_tokenizer(tokenizer, lowercase=True)
    torch.manual_seed(0)
    ElectraModel(ElectraConfig(vocab_size=vocab_size(loaded))).save_pretrained(folder)
    loaded.save(str(folder / "tokenizer.json"))
    special = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": LENGTH, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def ours(model: Path, seed: int, request: argparse.Namespace, out: Path) -> dict[str, float]:
    settings = {
        "train.seed": seed,
        "train.precision": request.precision,
        "train.sequences_per_step": BATCH,
        "finetune.epochs": 1,
        "finetune.train_rows": request.rows,
        "optimizer.learning_rate": RATE,
        "optimizer.layer_decay": 1.0,
        "finetune.dropout": 0.1,
        "task.sequence_length": LENGTH,
    }
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [
        sys.executable,
        "-m",
        "discern",
        "finetune",
        model,
        "--task",
        "sst2",
        "--data",
        request.data,
        "--out",
        out,
        "--json",
    ]
    done = subprocess.run([*map(str, command), *given], check=True, capture_output=True, text=True)
    results = json.loads(done.stdout)
    return {"examples_per_second": round(request.rows / results["seconds"], 1), "accuracy": results["median"]}


def peer(model: Path, seed: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, *sys.argv, "--peer", str(model), str(seed)], check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def trainer(model: str, seed: int, request: argparse.Namespace) -> dict[str, float]:
    """Time the same with transformers, in a process of its own."""
    from transformers import (
        AutoTokenizer,
        DataCollatorWithPadding,
        ElectraForSequenceClassification,
        Trainer,
        TrainingArguments,
    )

    from discern.tasks.classification import ClassificationConfig
    from discern.tasks.named import TASKS

    tokenizer = AutoTokenizer.from_pretrained(model)

    def encoded(split: str) -> list[dict[str, Any]]:
        examples = TASKS["sst2"].read(request.data / f"{split}.tsv", split, ClassificationConfig()).examples
        if split == "train":
            order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0)).tolist()
            examples = tuple(examples[place] for place in order[: request.rows])
        rows = tokenizer([example.text for example in examples], truncation=True, max_length=LENGTH)
        return [
            {"input_ids": ids, "attention_mask": mask, "labels": int(str(example.label))}
            for ids, mask, example in zip(rows["input_ids"], rows["attention_mask"], examples, strict=True)
        ]

    torch.manual_seed(seed)
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "summary_last_dropout": 0.1}
    network = ElectraForSequenceClassification.from_pretrained(model, num_labels=2, dtype=torch.float32, **dropout)
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            out,
            num_train_epochs=1,
            per_device_train_batch_size=BATCH,
            learning_rate=RATE,
            warmup_steps=int(0.1 * request.rows / BATCH),
            lr_scheduler_type="linear",
            weight_decay=0.0,
            max_grad_norm=1.0,
            seed=seed,
            bf16=request.precision == "bfloat16",
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        training = Trainer(network, arguments, train_dataset=encoded("train"), data_collator=DataCollatorWithPadding(tokenizer))
        seconds = training.train().metrics["train_runtime"]
        dev = encoded("dev")
        said = training.predict(dev).predictions.argmax(-1).tolist()
    right = sum(label == row["labels"] for label, row in zip(said, dev, strict=True))
    return {"examples_per_second": round(request.rows / seconds, 1), "accuracy": right / len(dev)}


if __name__ == "__main__":
    main()
