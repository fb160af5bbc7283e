"""Compare fine-tuning speed on SST-2 with transformers' Trainer, in turns, so that load on the machine affects both alike.

    python benchmarks/finetune.py [--data glue/SST-2] [--tokenizer vocab.txt] [--rows 2000] [--rounds 3] [--model FOLDER]

Both train the same weights (new, or those of a folder) on the same number of rows, with the same batch size,
learning rate, schedule, dropout and number of steps, and evaluate the whole dev set. The Trainer pads dynamically
(DataCollatorWithPadding); discern batches rows of similar length. Only the training is timed, without start-up and evaluation:
`train_runtime` of the Trainer, and the seconds of discern's loop. Both run in float32 and in bfloat16, the Trainer also with
torch_compile, whose compilation is part of its time. Prints Markdown. The Trainer needs `pip install accelerate`.
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
PROGRAMS = [f"{name}, {precision}" for name in ("transformers", "discern") for precision in ("float32", "bfloat16")]
PROGRAMS.insert(2, "transformers, bfloat16, compiled")


def main() -> None:
    root = Path(os.environ.get("DISCERN_TEST_DATA", "."))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=root / "glue/SST-2")
    parser.add_argument("--tokenizer", type=Path, default=root / "vocab/bert-uncased-en.txt")
    parser.add_argument("--model", type=Path, help="an export or a Hugging Face folder, instead of fresh weights")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, help="what to run")
    parser.add_argument("--peer", nargs=3, metavar=("MODEL", "SEED", "NAME"), help=argparse.SUPPRESS)
    request = parser.parse_args()
    if request.peer:
        print(json.dumps(trainer(request.peer[0], int(request.peer[1]), request.peer[2], request)))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = request.model or fresh_model(Path(folder) / "model", request.tokenizer)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in request.programs}
        for seed in range(request.rounds):
            for name, results in rounds.items():
                out = Path(folder) / f"{name}-{seed}"
                results.append(ours(model, seed, name, request, out) if name.startswith("discern") else peer(model, seed, name))
                print(f"seed {seed}, {name}: {results[-1]}", file=sys.stderr, flush=True)
    speeds = {name: [result["examples_per_second"] for result in results] for name, results in rounds.items()}
    peers = [name for name in speeds if name.startswith("transformers")]
    columns = ["examples/s, median (least to most)", *(f"over {name}" for name in peers), "accuracy by seed"]
    print(f"| {request.rows:,} rows | {' | '.join(columns)} |\n{'|---' * (len(columns) + 1)}|")
    for name, own in speeds.items():
        ratios = [f"{statistics.median(a / b for a, b in zip(own, speeds[peer], strict=True)):.2f}" for peer in peers]
        accuracies = ", ".join(f"{result['accuracy']:.3f}" for result in rounds[name])
        spread = f"{statistics.median(own):,.1f} ({min(own):,.1f} to {max(own):,.1f})"
        print(f"| {' | '.join([name, spread, *ratios, accuracies])} |")


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


def ours(model: Path, seed: int, name: str, request: argparse.Namespace, out: Path) -> dict[str, float]:
    settings = {
        "train.seed": seed,
        "train.precision": name.split(", ")[1],
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


def peer(model: Path, seed: int, name: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, *sys.argv, "--peer", str(model), str(seed), name], check=True, capture_output=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def trainer(model: str, seed: int, name: str, request: argparse.Namespace) -> dict[str, float]:
    """Time the same with transformers, in a process of its own."""
    from transformers import (
        AutoConfig,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
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
    config = AutoConfig.from_pretrained(model, num_labels=2)
    electra = ("hidden_dropout_prob", "attention_probs_dropout_prob", "summary_last_dropout")
    for setting in (*electra, "attention_dropout", "mlp_dropout", "embedding_dropout", "classifier_dropout"):
        if hasattr(config, setting):
            setattr(config, setting, 0.1)
    network = AutoModelForSequenceClassification.from_pretrained(model, config=config, dtype=torch.float32)
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
            bf16="bfloat16" in name,
            torch_compile="compiled" in name,
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
