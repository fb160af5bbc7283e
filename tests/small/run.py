"""A run's folder made by hand: a tokenizer, weights far from zero, a checkpoint and a journal; no training."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from discern.config.schema import to_toml
from discern.data.tokenizer import fingerprint, special_tokens, vocab_size
from discern.model_files.run import CHECKPOINTS, CONFIG_FILE, COUNTS_FILE, FORMAT, RECORD_FILE, TOKENIZER_FILE, build_objective
from discern.objectives.base import Objective, Vocabulary
from discern.storage.checksums import write_recorded
from discern.training import checkpoint
from discern.training.config import load_pretrain_config
from tests.parity.small_networks import make_noisy
from tests.small.tokenizers import small_tokenizer

TOKENS = 4444
"""Read up to the checkpoint, which is later than the last record of the log."""
STATISTICS = {"documents": 1611, "duplicates": 0, "tokens": 111_597, "unknown_fraction": 0.00123}
EVALUATION = {
    "step": 20,
    "tokens": 4321,
    "seconds": 1.5,
    "tokens_per_second": 2900.0,
    "peak_memory_bytes": 2**30,
    "loss": 42.0,
    "generator_loss": 6.5,
    "heldout_loss": 43.5,
    "heldout_generator_loss": 6.75,
    "discriminator_auc": 0.8125,
}


def make_run(
    folder: Path,
    *,
    overrides: Sequence[str] = (),
    tokenizer: str = "wordpiece, lower-cased",
    metrics: Sequence[Mapping[str, Any]] = (EVALUATION,),
    step: int = 20,
) -> Objective:
    """Write a run of preset tiny; gives its objective in evaluation mode."""
    built = small_tokenizer(tokenizer)
    config = load_pretrain_config(None, "tiny", overrides).config
    objective = build_objective(config, Vocabulary(vocab_size(built), special_tokens(built)))
    make_noisy(objective)
    folder.mkdir(parents=True)
    record = {
        "format": FORMAT,
        "discern": "0.1.0",
        "data": [str(folder.parent / "data")],
        "data_fingerprint": "",
        "tokenizer_fingerprint": fingerprint(built),
        "vocab_size": vocab_size(built),
        "special_tokens": asdict(special_tokens(built)),
        "statistics": STATISTICS,
        "arithmetic": {"device": "cpu", "precision": "float32"},
        "versions": {"torch": "2.13.0"},
    }
    files = {
        TOKENIZER_FILE: built.to_str(pretty=True),
        CONFIG_FILE: to_toml(config),
        COUNTS_FILE: "3\n" * vocab_size(built),
        RECORD_FILE: json.dumps(record),
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in metrics),
    }
    write_recorded(folder, files)
    contents = checkpoint.Contents(checkpoint.model_tensors(objective), {}, {}, {"step": step, "tokens": TOKENS})
    checkpoint.save(folder / CHECKPOINTS, contents, 2)
    return objective.eval()
