"""The command `discern pretrain` as a user runs it, and what a run leaves behind."""

import json
import subprocess
import sys
from pathlib import Path

from discern.progress import Silent

WORDS = "the a small old red big cat dog bird house tree river sat ran flew saw found left near under over and then".split()
DISCERN = [sys.executable, "-m", "discern"]
FAST = ["--set", "train.checkpoint_every_steps=3", "--set", "train.log_every_steps=5"]
LIMIT = 180  # seconds a command may take before the test gives up


def run(*arguments: object, limit: float = LIMIT, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DISCERN, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=limit,
        **options,  # type: ignore[call-overload]
    )


class Notes(Silent):
    """A listener that keeps the notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, message: str) -> None:
        self.lines.append(message)


def command(data: Path, out: Path, steps: int, *more: str) -> list[str]:
    return [
        "pretrain",
        "--preset",
        "tiny",
        "--data",
        str(data),
        "--out",
        str(out),
        "--set",
        f"train.max_steps={steps}",
        *FAST,
        *more,
    ]


def weights(out: Path, step: int) -> bytes:
    return (out / "checkpoints" / f"step-{step:08d}" / "model.safetensors").read_bytes()


def figures(out: Path) -> list[dict[str, float]]:
    """What a run recorded, without its timing."""
    timing = {"seconds", "tokens_per_second", "data_share", "device_share", "peak_memory_bytes"}
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in timing} for line in lines]
