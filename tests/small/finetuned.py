"""A fine-tuned folder made by hand: a tiny encoder, heads far from zero, results; no training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from discern.data.tokenizer import fingerprint, vocab_size
from discern.finetuning.run import write_weights
from discern.model_files.finetuned import make_record, seed_folder
from discern.model_files.folder import LoadedEncoder, choose_encoder
from discern.models.base import build_embeddings, build_encoder
from discern.models.config import ModelConfig, build_config
from discern.storage.checksums import write_json, write_recorded
from discern.tasks import families, tasks as registry
from discern.tasks.base import Definition, Labels, Layout, Task
from discern.tasks.supervised import supervised
from tests.parity.small_networks import make_noisy
from tests.small.tokenizers import small_tokenizer


@dataclass(frozen=True)
class Made:
    """One task of a fine-tuned folder: a named one, or that of a file with this layout."""

    family: str
    labels: Labels
    metrics: tuple[str, ...]
    layout: Layout | None = None
    settings: Mapping[str, Any] | None = None


def columns(kind: str = "label", **names: str) -> Layout:
    """The layout of a table with these columns, by role."""
    return Layout({role: (name,) for role, name in names.items()}, kind=kind)


SINGLE = Made("classification", Labels(("bad", "good", "so-so")), ("accuracy",), columns(text="review", label="stars"))
PAIR = Made(
    "classification",
    Labels(("no", "yes"), pairs=True),
    ("accuracy",),
    columns(text="a", pair="b", label="same"),
    {"pooling": "cls"},
)
MULTI = Made("classification", Labels(("old", "red"), "multi"), ("micro_f1",), columns("labels", text="text", label="labels"))
NUMBER = Made(
    "classification",
    Labels((), "number", scale=2.5, shift=3.0),
    ("pearson",),
    columns("number", text="text", label="score"),
)
TAGS = Made(
    "tagging",
    Labels(("B-X", "E-X", "I-X", "O", "S-X"), "tags", scheme="iob2"),
    ("f1", "precision", "recall", "accuracy"),
    columns(words="words", tags="tags"),
)
SPANS = Made(
    "squad1",
    Labels((), "spans"),
    ("exact_match", "f1"),
    columns(question="question", context="context", answer="answer"),
    {"head": "span", "sequence_length": 48},
)


MODERN = build_config(
    encoder="modernbert", num_layers=2, hidden_size=32, embedding_size=32, num_heads=2, feedforward_size=48, local_window=8
)
"""An encoder of ModernBERT, for `make_finetuned`."""
DEBERTA = build_config(
    encoder="deberta", num_layers=2, hidden_size=32, embedding_size=32, num_heads=2, feedforward_size=48, position_buckets=8
)
"""An encoder of DeBERTa, for `make_finetuned`."""
XLNET = build_config(encoder="xlnet", num_layers=2, hidden_size=32, embedding_size=32, num_heads=2, feedforward_size=48)
"""An encoder of XLNet, for `make_finetuned`."""


def make_finetuned(folder: Path, *, seeds: int = 1, model: ModelConfig | None = None, **made: Made) -> Path:
    """Write a fine-tuning of preset tiny, or of an encoder with other settings, with these tasks."""
    folder.mkdir(parents=True)
    tokenizer, path = small_tokenizer("wordpiece, lower-cased"), folder / "tokenizer.json"
    tokenizer.save(str(path))
    if model is None:
        loaded = choose_encoder("tiny", path, untrained=False, warn=print)
    else:
        words = build_embeddings(vocab_size(tokenizer), model.embedding_size, model)
        loaded = LoadedEncoder(build_encoder(words, model), path, 32, "made by hand")
    tasks: dict[str, Task[Any]] = {}
    definitions: dict[str, Definition[Any]] = {}
    for name, each in made.items():
        family = families.load(each.family)
        config = family.Config(**{"sequence_length": 32, **(each.settings or {})})
        tasks[name] = family(name, config, each.metrics, each.labels)
        definitions[name] = Definition(name, family, (), layout=each.layout) if each.layout else registry.load(name)
    files = {name: {"train": f"{name}.train"} for name in tasks}
    record = make_record(loaded, tasks, definitions, files)
    for entry in record["tasks"].values():
        entry["digests"] = {}
    record |= {"debug": False, "tokenizer_fingerprint": fingerprint(tokenizer)}
    record["provenance"] = {"languages": ["de"], "licenses": ["CC0"]}
    write_recorded(folder, {"finetuned.json": json.dumps(record), "tokenizer.json": path.read_text(), "config.toml": "[train]\n"})
    objective = supervised(loaded.encoder, tasks)
    scores = []
    for seed in range(seeds):
        with torch.no_grad():
            make_noisy(objective, seed)
        seed_folder(folder, seed).mkdir()
        write_weights(seed_folder(folder, seed), objective)
        scores.append(0.5 + seed / 10)
        judged: dict[str, Any] = {"tasks": {name: {each.metrics[0]: scores[-1]} for name, each in made.items()}}
        judged |= {"steps": 60, "passes": 26.6, "kept_step": 40, "seconds": 1.0, "padding_fraction": 0.25}
        write_json(seed_folder(folder, seed) / "scores.json", judged)
    entries = {
        name: {
            "task": name,
            "metric": each.metrics[0],
            "split": "dev",
            "selected_on": None,
            "train_examples": 1234,
            "examples": 321,
            "median": scores[0],
            "mean": scores[0],
            "standard_deviation": 0.01,
            "best": scores[-1],
            "worst": scores[0],
            "scores": scores,
            "metrics": {each.metrics[0]: scores[0], "loss": 0.25},
            "failed_seeds": {},
        }
        for name, each in made.items()
    }
    several = {"task": "+".join(entries), "tasks": entries} if len(entries) > 1 else {}
    results = {**next(iter(entries.values())), **several, "best_seed": seeds - 1, "seeds": list(range(seeds))}
    results |= {"passes": 26.6, "kept_step": 40, "padding_fraction": 0.25}
    settings: dict[str, Any] = {"optimizer.learning_rate": 3e-4, "train.max_steps": 60, "files.train": "/home/somebody/train.csv"}
    settings |= {
        "finetune.recipe": "electra",
        "finetune.epochs": 3.0,
        "finetune.few_shot": False,
        "train.sequences_per_step": 4,
        "optimizer.layer_decay": 0.8,
    }
    results |= {"model": loaded.description, "seconds": 1.0, "discern": "0.1.0", "settings": settings}
    write_json(folder / "results.json", results)
    return folder
