"""Suggested next commands after each verb, for the device and the output at hand."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from discern.parsing import toml_tables

# What shows at once what a network of each objective has learned.
_SHOWN_BY = {
    "rtd": "detect {run} --text 'Some text.'",
    "rtd-masked-only": "detect {run} --text 'Some text.'",
    "mlm": "fill {run} 'The [MASK] sat on the mat.'",
    "replace-mlm": "fill {run} 'The [MASK] sat on the mat.'",
    "all-tokens-mlm": "fill {run} 'The [MASK] sat on the mat.'",
    "electric": "score {run} sentences.txt",
    "permutation-lm": "score {run} sentences.txt",
}


def hint(*commands: str) -> str:
    """The lines that name them, a command a line, so that each can be copied."""
    return "\n".join(["next:", *(f"  discern {command}" for command in commands)])


def has_gpu() -> bool:
    """Whether this machine has a GPU that a process may use, without loading torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def after_prepare(data: Path, *, tokenizer: Path | None = None, words: bool = False) -> str:
    """Pre-train on the data set, with a recipe that suits the device; or go on with the model that the tokenizer is of.

    Args:
        tokenizer: that was given; None: one was trained.
        words: a segmenter found words, so that whole words can be masked.
    """
    if tokenizer is not None and (tokenizer / "config.json").is_file():
        return hint(f"adapt {_quoted(tokenizer)} --data {_quoted(data)} --out RUN")
    recipe = "electra-small" if has_gpu() else "cpu-small"
    masking = " --set objective.masking=whole-word" if words else ""
    return hint(f"pretrain --preset {recipe} --data {_quoted(data)} --out RUN{masking}")


def after_pretrain(run: Path) -> str:
    """Measure it, try it out, and hand it over."""
    shown = _SHOWN_BY.get(_objective(run))
    quoted = _quoted(run)
    tried = [shown.format(run=quoted)] if shown else []
    return hint(f"evaluate {quoted}", *tried, f"export {quoted} --out MODEL", f"finetune {quoted} --train FILE.csv --out TUNED")


def after_finetune(out: Path, tasks: Sequence[str]) -> str:
    """Apply it, judge it, look at its mistakes, and hand it over."""
    quoted = _quoted(out)
    of = f" --task {tasks[0]}" if len(tasks) > 1 else ""
    return hint(
        f"predict {quoted} FILE{of}", f"evaluate {quoted} --data FILE{of}", f"report {quoted}", f"export {quoted} --out MODEL{of}"
    )


def after_export(folder: Path) -> str:
    """Fine-tune what was exported."""
    return hint(f"finetune {_quoted(folder)} --train FILE.csv --out TUNED")


def after_evaluate(model: Path, *, run: bool) -> str:
    """Diagnose a run, and look at its plots."""
    quoted = _quoted(model)
    return hint(f"doctor {quoted}", f"report {quoted}") if run else hint(f"report {quoted}")


def _objective(run: Path) -> str:
    try:
        settings = toml_tables((run / "config.toml").read_text(encoding="utf-8"))
        return str(settings["objective"]["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
