"""Checks before any work that a verb does not overwrite its inputs, using the parameters of the verb."""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, get_args

import typer

from discern.cli.console import print_error
from discern.errors import ConfigError
from discern.parsing import json_value, toml_tables
from discern.storage.output import check_apart

OUTPUTS = {"out": "--out", "html": "--html", "submission": "--submission"}
"""Parameters that name outputs. All other paths are inputs."""

OWN = ("report.html",)
"""Outputs that belong inside the folder that they describe."""

# Read completely before anything is written, so it may be inside the output folder, such as the config.toml of a run.
_READ_BEFORE = ("config", "tokenizer")


def guarded(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb, preceded by a check that no output is an input, contains one, or lies inside a data set, a run or a model."""

    @wraps(verb)
    def checked(**values: Any) -> Any:
        reads = [path for name in inputs_of(verb) for path in _paths(values.get(name))]
        try:
            for name, option in OUTPUTS.items():
                for out in _paths(values.get(name)):
                    check_apart(out, *reads, option=option, own=OWN)
        except ConfigError as error:
            print_error(error.message, error.hint)
            raise SystemExit(error.exit_code) from None
        return verb(**values)

    return checked


def inputs_of(verb: Callable[..., Any]) -> list[str]:
    """Names of the parameters that are input paths: arguments, and options with paths."""
    return [
        name
        for name, (annotation, info) in _parameters(verb).items()
        if name not in (*OUTPUTS, *_READ_BEFORE) and (isinstance(info, typer.models.ArgumentInfo) or "Path" in str(annotation))
    ]


def _parameters(verb: Callable[..., Any]) -> Mapping[str, tuple[Any, Any]]:
    """Type of each parameter, and its description by typer."""
    found = {}
    for name, parameter in inspect.signature(verb, eval_str=True).parameters.items():
        kind, *described = get_args(parameter.annotation) or (parameter.annotation,)
        found[name] = (kind, described[0] if described else None)
    return found


def _paths(value: Any) -> Iterator[Path]:
    """The paths in the value of a parameter."""
    values = value if isinstance(value, list | tuple) else [value]
    yield from (Path(each) for each in values if isinstance(each, str | Path) and str(each) != "-")


# A command that shows what a network of each objective has learned.
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
    """The suggested commands, one per line, so that each can be copied."""
    return "\n".join(["next:", *(f"  discern {command}" for command in commands)])


def has_gpu() -> bool:
    """Whether this machine has a GPU that the process may use; does not import torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def after_prepare(data: Path | str, *, tokenizer: Path | None = None, words: bool = False) -> str:
    """Pre-train on the data set with a preset that suits the device, or adapt the model that the tokenizer belongs to.

    Args:
        tokenizer: path of the tokenizer; None if one was trained.
        words: whether a segmenter found words, so that whole words can be masked.
    """
    if tokenizer is not None and (tokenizer / "config.json").is_file():
        return hint(f"adapt {shell_path(tokenizer)} --data {shell_path(data)} --out RUN")
    recipe = "gpu-minutes" if has_gpu() else "modern-cpu"
    masking = " --set objective.masking=whole-word" if words else ""
    return hint(f"pretrain --preset {recipe} --data {shell_path(data)} --out RUN{masking}")


def after_pretrain(run: Path) -> str:
    """Evaluate the run if text was held out, try it out, export it, and fine-tune it."""
    shown = _SHOWN_BY.get(_objective(run))
    quoted = shell_path(run)
    tried = [f"evaluate {quoted}"] if _has_heldout(run) else []
    tried += [shown.format(run=quoted)] if shown else []
    return hint(*tried, f"export {quoted} --out MODEL", f"finetune {quoted} --train FILE.csv --out TUNED")


def after_finetune(out: Path, tasks: Sequence[str], *, embeds: bool = False) -> str:
    """Apply the fine-tuned model, evaluate it, look at its mistakes, and export it.

    Args:
        embeds: whether it was trained for text embeddings.
    """
    quoted = shell_path(out)
    if embeds:
        vectors = f"embed {quoted} FILE --out vectors.npy"
        return hint(vectors, f"evaluate {quoted} --data FILE", f"report {quoted}", f"export {quoted} --out MODEL")
    of = f" --task {tasks[0]}" if len(tasks) > 1 else ""
    return hint(
        f"predict {quoted} FILE{of}", f"evaluate {quoted} --data FILE{of}", f"report {quoted}", f"export {quoted} --out MODEL{of}"
    )


def after_export(folder: Path) -> str:
    """Fine-tune the exported model."""
    return hint(f"finetune {shell_path(folder)} --train FILE.csv --out TUNED")


def after_evaluate(model: Path, *, run: bool) -> str:
    """Diagnose a run and look at its plots."""
    quoted = shell_path(model)
    return hint(f"doctor {quoted}", f"report {quoted}") if run else hint(f"report {quoted}")


def _objective(run: Path) -> str:
    try:
        settings = toml_tables((run / "config.toml").read_text(encoding="utf-8"))
        return str(settings["objective"]["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _has_heldout(run: Path) -> bool:
    """Whether text was held out from the run; also if that cannot be told, as for a data set in an object store."""
    try:
        folders = map(Path, json_value((run / "run.json").read_bytes())["data"])
        manifests = [json_value((data / "manifest.json").read_bytes()) for data in folders]
        return any(manifest["splits"]["heldout"]["num_documents"] for manifest in manifests)
    except (OSError, ValueError, KeyError, TypeError):
        return True


def shell_path(path: Path | str) -> str:
    """A path as the command line takes it, also with spaces, or with a dash in the beginning."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)
