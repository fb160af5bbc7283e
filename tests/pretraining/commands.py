"""Pre-training of preset tiny, in this process or in one of its own, and what a run leaves behind."""

import json
from pathlib import Path
from typing import Any

from discern.pretraining.run import pretrain
from discern.progress import Silent
from tests.processes import Program

FAST = ("train.checkpoint_every_steps=3", "train.log_every_steps=5")
CONSTANT = ("optimizer.schedule=constant", "optimizer.warmup_steps=1")
"""A rate that does not depend on the length of the run."""
TIMING = {"seconds", "tokens_per_second", "data_share", "device_share", "energy_joules", "peak_memory_bytes"}
LIMIT = 180  # seconds a command may take before the test gives up


class Notes(Silent):
    """A listener that keeps the notes, and the warnings among them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)

    def warn(self, message: str) -> None:
        self.lines.append(f"warning: {message}")


def train(data: Path, out: Path, steps: int, *overrides: str, **options: Any) -> str:
    """Train in this process, and give the notes."""
    notes = Notes()
    settings = {"preset": "tiny", "overrides": (f"train.max_steps={steps}", *FAST, *overrides)}
    pretrain(data=data, out=out, progress=notes, **(settings | options))
    return "\n".join(notes.lines)


def start(data: Path | str, out: Path, steps: int, *overrides: str, options: tuple[str, ...] = ()) -> Program:
    """Train in a process of its own, as a user does."""
    line = ["-m", "discern", "pretrain", "--preset", "tiny", "--data", str(data), "--out", str(out), *options]
    line += [word for setting in (f"train.max_steps={steps}", *FAST, *overrides) for word in ("--set", setting)]
    return Program(*line)


def weights(out: Path, step: int) -> bytes:
    return (out / "checkpoints" / f"step-{step:08d}" / "model.safetensors").read_bytes()


def figures(out: Path) -> list[dict[str, float]]:
    """What a run recorded, without its timing."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in TIMING} for line in lines]
