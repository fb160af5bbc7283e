"""Few labels: `discern finetune`, with the encoder frozen and trained, against SetFit's recipe on the same encoder and rows.

SetFit (Tunstall et al. 2022, "Efficient few-shot learning without prompts"): pairs of rows, 20 of the same class and 20 of others
for each row, train the mean of the states by the squared error of their cosine, one pass in batches of 16; then logistic
regression on the vectors. It is written on sentence-transformers here.

    python benchmarks/few_shot.py examples/models/modern-cpu FOLDER... --out few-shot.json

A folder has train.csv and test.csv with the columns text and label.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

TEST_ROWS = 1000


def read(path: Path) -> tuple[list[str], list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [row["text"] for row in rows], [row["label"] for row in rows]


def write(path: Path, texts: list[str], labels: list[str]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *zip(texts, labels, strict=True)])


def discern(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "discern", *map(str, arguments)], check=True, capture_output=True)


def finetuned(model: Path, work: Path, setting: str) -> list[str]:
    """The labels that discern predicts for the test rows."""
    options = ("--no-baselines", "--overwrite", "--set", setting)
    # All rows train, and the test rows are the dev file. Only a trained encoder has anything fitted to them: two factors.
    discern("finetune", model, "--train", work / "train.csv", "--dev", work / "test.csv", "--out", work / "out", *options)
    (work / "predicted.jsonl").unlink(missing_ok=True)
    discern("predict", work / "out", work / "test.csv", "--out", work / "predicted.jsonl")
    return [json.loads(line)["label"] for line in (work / "predicted.jsonl").read_text(encoding="utf-8").splitlines()]


def setfit(
    exported: Path, train: tuple[list[str], list[str]], test: list[str], rate: float, rng: np.random.Generator
) -> list[str]:
    """The labels that SetFit's recipe predicts for the test rows."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from sklearn.linear_model import LogisticRegression

    transformer = Transformer(str(exported))
    transformer.max_seq_length = 128
    body = SentenceTransformer(modules=[transformer, Pooling(transformer.get_embedding_dimension(), "mean")], device="cpu")
    texts, labels = train[0], np.array(train[1])
    pairs = []
    for row, label in enumerate(labels):
        for target, others in ((1.0, np.flatnonzero(labels == label)), (0.0, np.flatnonzero(labels != label))):
            pairs += [(row, other, target) for other in rng.choice(others, 20)]
    order = rng.permutation(len(pairs))
    optimizer = torch.optim.AdamW(body.parameters(), lr=rate)
    steps = -(-len(pairs) // 16)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps))
    )
    body.train()
    for start in range(0, len(order), 16):
        batch = [pairs[index] for index in order[start : start + 16]]
        vectors = [body(body.preprocess([texts[pair[side]] for pair in batch]))["sentence_embedding"] for side in (0, 1)]
        targets = torch.tensor([pair[2] for pair in batch])
        loss = (torch.cosine_similarity(*vectors) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(body.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    head = LogisticRegression(max_iter=1000).fit(body.encode(texts, show_progress_bar=False), labels)
    return list(head.predict(body.encode(test, show_progress_bar=False)))


def tfidf(train: tuple[list[str], list[str]], test: list[str]) -> list[str]:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    pipeline = make_pipeline(TfidfVectorizer(ngram_range=(1, 2)), LogisticRegression(C=10, max_iter=1000))
    return list(pipeline.fit(*train).predict(test))


def measure(arguments: argparse.Namespace, work: Path, folder: Path, count: int, draw: int) -> dict[str, Any]:
    """Accuracies and seconds by method, of one draw of training rows."""
    rng = np.random.default_rng(draw)
    texts, labels = read(folder / "train.csv")
    rows = [row for name in sorted(set(labels)) for row in rng.permutation(np.flatnonzero(np.array(labels) == name))[:count]]
    train = [texts[row] for row in rows], [labels[row] for row in rows]
    inputs, expected = (column[:TEST_ROWS] for column in read(folder / "test.csv"))
    write(work / "train.csv", *train)
    write(work / "test.csv", inputs, expected)
    methods = {"tfidf": partial(tfidf, train, inputs)}
    for frozen in ("true", "false"):
        methods[f"finetune.few_shot={frozen}"] = partial(finetuned, arguments.model, work, f"finetune.few_shot={frozen}")
    for rate in arguments.rates:
        methods[f"setfit {rate:g}"] = partial(setfit, work / "exported", train, inputs, rate, rng)
    result: dict[str, Any] = {"set": folder.name, "labels": count, "draw": draw, "accuracy": {}, "seconds": {}}
    for name, predict in methods.items():
        start = time.perf_counter()
        result["accuracy"][name] = float(np.mean(np.array(predict()) == np.array(expected)))
        result["seconds"][name] = round(time.perf_counter() - start, 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--labels", type=int, nargs="+", default=[8, 16, 64], help="labels of each class, at most")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-5, 3e-4], help="learning rates of SetFit's recipe")
    parser.add_argument("--out", type=Path, required=True, help="existing results are kept")
    arguments = parser.parse_args()
    results = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else []
    done = {(result["set"], result["labels"], result["draw"]) for result in results}
    with tempfile.TemporaryDirectory() as temporary:
        discern("export", arguments.model, "--out", Path(temporary) / "exported")
        for draw, count, folder in product(range(arguments.draws), arguments.labels, arguments.folders):
            if (folder.name, count, draw) not in done:
                results.append(measure(arguments, Path(temporary), folder, count, draw))
                print(json.dumps(results[-1]), flush=True)
                arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
