"""Golden runs: 50 float32 steps of a tiny network on made-up text, one thread, for every objective and for every option of one
that is a way of training of its own.

`python -m tests.golden.runs [NAME...]` records them anew; do that only where the numerics are meant to change, and say
why in the commit that changes them.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from discern import kernels
from discern.data.batching.rows import scheduled_rows
from discern.data.config import DataConfig
from discern.objectives import objectives
from discern.objectives.base import Objective
from discern.progress import Silent
from discern.training.config import OptimizerConfig, TrainConfig, step_sizes
from discern.training.distributed import Ranks
from discern.training.loop import train
from discern.training.metrics import MetricsLog, read_metrics
from discern.training.process import StopRequest
from discern.training.state import State, TrainContext
from tests.support import MODELS, SPECIAL, MemorySplit, settings

FOLDER = Path(__file__).parent
KEYS = (
    *("loss", "grad_norm", "generator_loss", "discriminator_loss", "correction_loss", "mlm_loss", "causal_lm_loss"),
    *("permutation_lm_loss", "heldout_loss"),
)
# What a run sets besides the defaults, by the objective's name.
OPTIONS: dict[str, dict[str, Any]] = {
    "permutation-lm": {"memory_length": 24},
    "hybrid": {"causal_fraction": 0.25, "mask_probability_steps": 40},
}
ROWS: dict[str, dict[str, Any]] = {"permutation-lm": {"packing": "two-part"}}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "rtd-two-stage": ("rtd", {"algorithm": "two-stage", "generator_size": 1.0, "tying": "none"}),
    "rtd-adversarial": ("rtd", {"algorithm": "adversarial"}),
    "rtd-hybrid": ("rtd", {"generator": "hybrid"}),
    "rtd-corrected": ("rtd", {"correction_weight": 1.0}),
    "rtd-two-tower": ("rtd", {"generator": "two-tower"}),
    "rtd-uniform": ("rtd", {"generator": "uniform"}),
    "rtd-unigram": ("rtd", {"generator": "unigram"}),
    "rtd-tied-whole": ("rtd", {"tying": "all", "generator_size": 1.0}),
    "rtd-tied-words": ("rtd", {"tying": "token"}),
    "rtd-untied": ("rtd", {"tying": "none"}),
    "rtd-disentangled": ("rtd", {"tying": "gradient-disentangled", "discriminator_head": "bilinear"}),
    "rtd-sampling": ("rtd", {"temperature": 0.8, "top_p": 0.9, "disallow_original": True}),
    "rtd-sentence-contrastive": ("rtd", {"sentence_contrastive_weight": 1.0}),
    "rtd-schedules": (
        "rtd",
        {
            "tying": "none",
            "freeze_generator_at": 40,
            "mask_probability_end": 0.3,
            "mask_probability_steps": 30,
        },
    ),
    "rtd-growing": ("rtd", {}),
    "permutation-lm-growing": ("permutation-lm", OPTIONS["permutation-lm"]),
    "mlm-entropy": (
        "mlm",
        {"masking": "entropy", "mask_probability": 0.4, "mask_probability_end": 0.15, "mask_probability_steps": 30},
    ),
    "rtd-entropy": ("rtd", {"masking": "entropy", "temperature": 2.0, "temperature_end": 0.7, "temperature_steps": 30}),
    "rtd-modernbert": ("rtd", {"tying": "gradient-disentangled"}),
    "rtd-modernbert-local": ("rtd", {}),
    "rtd-deberta": ("rtd", {"tying": "gradient-disentangled", "generator_size": 1.0, "generator_depth": 0.5}),
    "mlm-with-replacement": ("mlm", {"masking": "with-replacement"}),
    "mlm-whole-word": ("mlm", {"masking": "whole-word"}),
    "mlm-span": ("mlm", {"masking": "span"}),
    "mlm-rarity": ("mlm", {"masking": "rarity"}),
    "rtd-muon": ("rtd", {}),
    "rtd-stable-adamw": ("rtd", {}),
    "permutation-lm-muon": ("permutation-lm", OPTIONS["permutation-lm"]),
    "rtd-wsd-averaged": ("rtd", {}),
}
"""By their names in file names: the objective, and what is set besides its defaults. Recorded on the plain path alone."""

# What a variant sets of the optimizer.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "rtd-muon": {"name": "muon"},
    "rtd-stable-adamw": {"name": "stable-adamw", "clip_norm": 0.0},
    "permutation-lm-muon": {"name": "muon", "layer_decay": 0.9},
    "rtd-wsd-averaged": {"schedule": "wsd", "decay_fraction": 0.4},
}
# Decay of the averaged weights of a variant, which are evaluated on the rows of training every ten steps.
AVERAGES = {"rtd-wsd-averaged": 0.9}


# How the steps of a variant grow: its rows, and their lengths.
GROWING: dict[str, tuple[Any, Any]] = dict.fromkeys(
    ("rtd-growing", "permutation-lm-growing"), (((0, 128), (25, 256)), ((0, 16), (36, 32)))
)

VARIANT_MODELS: dict[str, dict[str, Any]] = {
    "rtd-modernbert": {"encoder": "modernbert", "local_window": 8},
    "rtd-modernbert-local": {"encoder": "modernbert", "local_window": 8, "attention_bias": True, "initialization": "local"},
    "rtd-deberta": {"encoder": "deberta", "position_buckets": 8, "mask_decoder": True},
}
"""What a variant sets of its model."""


def text(*, long_words: bool = False) -> MemorySplit:
    """Documents in which the next token mostly follows from the one before, without any library's random numbers.

    Args:
        long_words: words of up to some tokens instead of one.
    """
    state, documents = 1, []
    for _ in range(60):
        sentences: list[list[int]] = []
        for _ in range(1 + state % 5):
            sentence = []
            for _ in range(4 + state % 13):
                state = (state * 48271) % 2147483647
                follows = 5 + (sentence[-1] * 7) % 40 if sentence and state % 10 < 7 else 5 + state % 45
                sentence.append(follows)
            sentences.append(sentence)
        documents.append(sentences)
    return MemorySplit(documents, begins=lambda token: not long_words or token % 3 > 0)


# Where something begins late, all 50 steps are computed again: elsewhere what differs does so soon.
CHANGING = ("rtd-two-stage", "rtd-schedules", "rtd-growing", "permutation-lm-growing", "rtd-wsd-averaged")


class StopAfter(Silent):
    """A listener that stops a run after some steps."""

    def __init__(self, steps: int) -> None:
        self.left, self.stop = steps, StopRequest()

    def advance(self, amount: float, **metrics: str) -> None:
        self.left -= 1
        self.stop.signal = None if self.left > 1 else signal.SIGINT


def build(name: str, **model: Any) -> Objective:
    """The objective of a run, its weights filled."""
    model |= VARIANT_MODELS.get(name, {})
    name, options = VARIANTS.get(name, (name, OPTIONS.get(name, {})))
    factory, given = objectives.load(name), settings(**MODELS.get(name, {}), **model)
    counted = replace(given.vocabulary, token_counts=torch.arange(1, given.vocabulary.size + 1))
    objective: Objective = factory(factory.Config(name=name, **options), replace(given, vocabulary=counted))
    objective.initialize(0)
    return objective


def record(name: str, steps: int = 50) -> list[dict[str, float]]:
    """Losses and gradient norm of the first of 50 steps, on the path that is switched on.

    The two paths have recordings of their own: they drop other elements out.
    """
    torch.set_num_threads(1)
    objective: Any = build(name)
    optimizer, average = OPTIMIZERS.get(name, {}), AVERAGES.get(name, 0.0)
    loop: dict[str, Any] = {"weight_average": average, "evaluate_every_steps": 10, "evaluate_sequences": 16} if average else {}
    batches, lengths = GROWING.get(name, ((), ()))
    name, options = VARIANTS.get(name, (name, OPTIONS.get(name, {})))
    data = DataConfig(sequence_length=32, length_schedule=lengths, **ROWS.get(name, {}))
    plan = TrainConfig(max_steps=50, sequences_per_step=8, log_every_steps=1, micro_batch_size=4, batch_schedule=batches, **loop)
    sizes = step_sizes(plan, data)
    in_slots = objective.config.reads_in_order
    progress = StopAfter(steps)
    source = scheduled_rows([text(long_words="masking" in options)], SPECIAL, data, 0, sizes.segments, in_slots=in_slots)
    with tempfile.TemporaryDirectory() as folder:
        train(
            TrainContext(
                objective=objective,
                source=source,
                heldout=source if average else None,
                optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=10, **optimizer),
                train=plan,
                sizes=sizes,
                ranks=Ranks(0, 1, torch.device("cpu")),
                precision="float32",
                folder=Path(folder),
                metrics_log=MetricsLog(Path(folder), 0),
                progress=progress,
                stop=progress.stop,
            ),
            State(),
        )
        return [{key: line[key] for key in KEYS if key in line} for line in read_metrics(Path(folder))]


def machine() -> str:
    """What decides the last bits: the processor's model and torch's version."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    wanted = ("vendor_id", "cpu family", "model\t", "stepping")
    return "; ".join([*(line.split(":")[1].strip() for line in lines if line.startswith(wanted)), torch.__version__])


def load(name: str, path: str) -> dict[str, Any]:
    """The recorded run of an objective or variant on the path 'kernels' or 'plain'."""
    golden: dict[str, Any] = json.loads((FOLDER / f"{name}-{path}.json").read_text())
    return golden


if __name__ == "__main__":
    for golden_path, context in (("kernels", nullcontext()), ("plain", kernels.switched_off())):
        with context:
            variants = VARIANTS if golden_path == "plain" else ()
            for wanted in sys.argv[1:] or [*objectives.names(), *variants]:
                if golden_path == "kernels" and wanted in VARIANTS:
                    continue
                golden = {"machine": machine(), "steps": record(wanted)}
                lines = ",\n".join(json.dumps(step) for step in golden["steps"])
                body = f'{{"machine": {json.dumps(golden["machine"])}, "steps": [\n{lines}\n]}}\n'
                (FOLDER / f"{wanted}-{golden_path}.json").write_text(body)
