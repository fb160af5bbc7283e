"""`discern export`: networks of a run, or a fine-tuned model, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from discern.cli.console import Console, JsonOption, command
from discern.cli.next_steps import after_export
from discern.errors import ConfigError

if TYPE_CHECKING:
    from discern.workflows.export import Exported
    from discern.workflows.export_finetuned import ExportedTask, TaskExportRequest

_LICENCE = "Fill in the license in README.md before you publish it."


def export(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Folder of a run, whose newest sound checkpoint is taken, or what 'discern finetune', 'discern import' or "
            "'discern export' wrote.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder, or an earlier export, which is replaced.")],
    network: Annotated[
        str | None,
        typer.Option("--network", metavar="NAME", help="discriminator (the default), generator; encoder of a run of 'mlm'."),
    ] = None,
    all_networks: Annotated[
        bool,
        typer.Option("--all-networks", help="Add the generator, in a folder of its own, so that 'discern evaluate' takes DIR."),
    ] = False,
    task: Annotated[str | None, typer.Option("--task", metavar="NAME", help="Of a fine-tuned model with several.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of a fine-tuned model: whose weights; without it the best.")] = None,
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option("--precision", help="Type that the weights are stored in.")
    ] = "float32",
    json_output: JsonOption = False,
) -> None:
    """Write a network of a run, or a fine-tuned model, with its tokenizer and a model card, as a folder that transformers loads.

    Examples: discern export runs/first --out my-encoder

    discern export OUT --out my-classifier
    """
    with command(json_output=json_output) as console:
        from discern.workflows.runs import is_finetuned

        if is_finetuned(run):
            if network is not None or all_networks:
                raise ConfigError(
                    "--network and --all-networks are for runs; a fine-tuned model has one network", hint="leave them out"
                )
            from discern.workflows.export_finetuned import TaskExportRequest

            _export_task(TaskExportRequest(run, out, task, seed, precision), console)
            return
        if task is not None or seed is not None:
            raise ConfigError(f"--task and --seed are for fine-tuned models, and {run} is none", hint="leave them out")
        from discern.workflows.export import ExportRequest
        from discern.workflows.export import export as run_export
        from discern.workflows.export_again import export_again, is_export

        request = ExportRequest(run, out, network, all_networks, precision)
        again = is_export(run)
        done = export_again(request, console.progress) if again else run_export(request, console.progress, console.warn)
        values = {
            "out": done.folder,
            "network": done.networks[0],
            "networks": done.networks,
            "architecture": done.architecture,
            "parameters": done.parameters,
            "precision": precision,
            "step": done.step,
            "bytes": done.num_bytes,
        }
        console.result(values, text=_text(done, precision))


def _export_task(request: TaskExportRequest, console: Console) -> None:
    from discern.workflows.export_finetuned import export_task

    done = export_task(request, console.progress)
    values = {
        "out": done.folder,
        "task": done.task,
        "seed": done.seed,
        "architecture": done.architecture,
        "parameters": done.parameters,
        "precision": request.precision,
        "bytes": done.num_bytes,
    }
    console.result(values, text=_task_text(done, request.precision))


def _task_text(done: ExportedTask, precision: str) -> str:
    folder, auto = str(done.folder), done.architecture.replace("Electra", "AutoModel")
    lines = [
        f"{folder}: {done.task}, seed {done.seed}, {done.parameters:,} parameters in {precision}, "
        f"{done.num_bytes / 1e6:,.1f} MB in all",
        f"  AutoTokenizer.from_pretrained({folder!r})",
        f"  {auto}.from_pretrained({folder!r})",
        f"  discern.load({folder!r}).predict(texts), or discern predict {folder} FILE",
    ]
    if not done.whole:
        lines[1:3] = [f"  transformers has no class for this head: its {done.architecture} is the encoder alone"]
    return "\n".join([*lines, _LICENCE])


def _text(done: Exported, precision: str) -> str:
    """What was written, and how to load it."""
    folder, (first, *others) = str(done.folder), done.networks
    at = "" if done.step is None else f" at step {done.step:,}"
    lines = [
        f"{folder}: the {first}{at}, {done.parameters:,} parameters in {precision}, {done.num_bytes / 1e6:,.1f} MB in all",
        f"  AutoTokenizer.from_pretrained({folder!r})",
        f"  {done.architecture}.from_pretrained({folder!r})",
    ]
    if others:
        lines.append(f"  discern evaluate {folder} --data DATA (with {', '.join(f'{folder}/{name}' for name in others)})")
    return "\n".join([*lines, _LICENCE, after_export(done.folder)])
