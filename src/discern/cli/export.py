"""`discern export`: write networks of a run, or a fine-tuned model, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from discern.cli.console import Console, JsonOption, command
from discern.cli.outputs import after_export, shell_path
from discern.errors import ConfigError

if TYPE_CHECKING:
    from discern.convert.export import Exported
    from discern.convert.export_finetuned import ExportedTask
    from discern.convert.parity import Parity
    from discern.convert.serving import Serving

_LICENSE = "Fill in the license in README.md before you publish the model."


def export(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Folder of a run, whose newest intact checkpoint is exported, or a folder written by 'discern finetune', "
            "'discern import' or 'discern export'.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="New folder, or an earlier export, which is replaced.")],
    network: Annotated[
        str | None,
        typer.Option(
            "--network",
            metavar="NAME",
            help="Network to export: discriminator (default) or generator; for a run of 'mlm', encoder.",
        ),
    ] = None,
    all_networks: Annotated[
        bool,
        typer.Option("--all-networks", help="Also export the generator, to a subfolder, so that 'discern evaluate' accepts DIR."),
    ] = False,
    task: Annotated[
        str | None, typer.Option("--task", metavar="NAME", help="Task to export, for a fine-tuned model with several tasks.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed to export, for a fine-tuned model (default: the best seed).")
    ] = None,
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option("--precision", help="Data type of the stored weights.")
    ] = "float32",
    form: Annotated[
        Literal["electra", "bert", "modernbert"] | None,
        typer.Option(
            "--as",
            help="Architecture of the exported model (default: its own). An ELECTRA whose embeddings are as wide as its hidden "
            "states can be exported as bert, without the head of a discriminator, for servers that do not support ELECTRA.",
        ),
    ] = None,
    sentence_transformers: Annotated[
        bool, typer.Option("--sentence-transformers", help="Also write the files of a sentence-transformers model.")
    ] = False,
    pooling: Annotated[
        Literal["mean", "mean-all", "cls"] | None,
        typer.Option(
            "--pooling",
            help="Vector of a text: mean of its tokens' states without [CLS] and [SEP] (mean, the default), with them (mean-all, "
            "for servers other than sentence-transformers), or the state of [CLS] (cls).",
        ),
    ] = None,
    normalize: Annotated[bool, typer.Option("--normalize", help="Scale text embeddings to length 1.")] = False,
    onnx: Annotated[
        bool,
        typer.Option("--onnx", help="Also write model.onnx, which onnxruntime runs without torch (needs discern-nlp[onnx])."),
    ] = False,
    int8: Annotated[
        bool,
        typer.Option(
            "--int8", help="With --onnx: store its matrices in eight bits, and report in README.md how much accuracy this costs."
        ),
    ] = False,
    max_loss: Annotated[
        float | None,
        typer.Option(
            "--max-loss",
            metavar="FRACTION",
            help="With --int8: fail, and write nothing, if the task's score drops by more than this, or, where there is no "
            "score, the agreement with float32.",
        ),
    ] = None,
    compare_on: Annotated[
        Path | None,
        typer.Option(
            "--compare-on",
            metavar="FILE",
            help="With --int8: texts to compare on, one per line (default: English sentences); for a classifier or other "
            "fine-tuned predictor, labeled examples (default: those that it was evaluated on, if the file is still there).",
        ),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Export a network of a run, or a fine-tuned model, as a folder that transformers loads, with tokenizer and model card.

    Examples: discern export runs/first --out my-encoder

    discern export OUT --out my-classifier

    discern export runs/first --out served --onnx --int8 --max-loss 0.01
    """
    with command(json_output=json_output) as console:
        from discern.api.exporting import serving_of
        from discern.artifacts.run import is_finetuned

        serving = serving_of(
            run,
            form=form,
            sentence_transformers=sentence_transformers,
            pooling=pooling,
            normalize=normalize,
            onnx=onnx,
            int8=int8,
            max_loss=max_loss,
            compare_on=compare_on,
            task=task,
            seed=seed,
            progress=console.progress,
        )
        if is_finetuned(run):
            if network is not None or all_networks:
                raise ConfigError(
                    "--network and --all-networks are for runs; a fine-tuned model has one network with its head",
                    hint="leave them out",
                )
            _export_task(console, run, out=out, task=task, seed=seed, precision=precision, serving=serving)
            return
        if task is not None or seed is not None:
            raise ConfigError(f"--task and --seed are for fine-tuned models, but {run} is not one", hint="leave them out")
        from discern.convert.export import export as export_networks

        done = export_networks(
            run,
            out=out,
            network=network,
            all_networks=all_networks,
            precision=precision,
            serving=serving,
            progress=console.progress,
            warn=console.warn,
        )
        values: dict[str, Any] = {
            "out": done.folder,
            "network": done.networks[0],
            "networks": done.networks,
            "architecture": done.architecture,
            "parameters": done.parameters,
            "precision": precision,
            "step": done.step,
            "bytes": done.num_bytes,
        } | _parity(done.parity)
        text = "\n".join([_text(done, precision), *_served(out, done.parity, vectors=sentence_transformers)])
        console.result(values, text=text)


def _export_task(
    console: Console, model: Path, *, out: Path, task: str | None, seed: int | None, precision: str, serving: Serving
) -> None:
    from discern.convert.export_finetuned import export_task

    done = export_task(model, out=out, task=task, seed=seed, precision=precision, serving=serving, progress=console.progress)
    values = {
        "out": done.folder,
        "task": done.task,
        "seed": done.seed,
        "architecture": done.architecture,
        "parameters": done.parameters,
        "precision": precision,
        "bytes": done.num_bytes,
    } | _parity(done.parity)
    served = _served(out, done.parity, vectors=serving.sentence_transformers and not done.gives_vectors)
    console.result(values, text="\n".join([_task_text(done, precision), *served]))


def _parity(parity: Parity | None) -> dict[str, Any]:
    """What --json prints about the ONNX file."""
    if parity is None:
        return {}
    found = {
        "largest_difference": parity.difference.largest,
        "agreement": parity.difference.agreement,
        "loss": parity.loss,
        "metric": parity.metric,
        "scores": parity.scores,
        "file_bytes": parity.sizes,
        "milliseconds": parity.milliseconds,
        "compared_on": parity.source,
    }
    return {"onnx": found}


def _served(folder: Path, parity: Parity | None, *, vectors: bool) -> list[str]:
    """Lines about the further forms of the model."""
    lines = [f"  SentenceTransformer({str(folder)!r})"] if vectors else []
    if parity is not None:
        precision = "int8" if "int8" in parity.sizes else "float32"
        size, agreement, largest = parity.sizes[precision] / 1e6, parity.difference.agreement, parity.difference.largest
        lines.append(
            f"  {folder / 'model.onnx'}: {precision}, {size:.1f} MB; agreement with the model {agreement:.4f}, largest "
            f"difference {largest:.2g} ({parity.texts:,} rows: {parity.source})"
        )
        if parity.scores:
            lines.append(f"  {parity.metric}: {parity.scores['onnx']:.4f}, of the model {parity.scores['torch']:.4f}")
    return lines


def _task_text(done: ExportedTask, precision: str) -> str:
    folder, auto = str(done.folder), done.architecture.replace("Electra", "AutoModel")
    lines = [
        f"{folder}: {done.task}, seed {done.seed}, {done.parameters:,} parameters in {precision}, "
        f"{done.num_bytes / 1e6:,.1f} MB in all",
        f"  AutoTokenizer.from_pretrained({folder!r})",
        f"  {auto}.from_pretrained({folder!r})",
        f"  discern.load({folder!r}).predict(texts), or discern predict {shell_path(folder)} FILE",
    ]
    if done.gives_vectors:
        lines[1:] = [
            f"  SentenceTransformer({folder!r})",
            f"  discern.load({folder!r}).encode(texts), or discern embed {shell_path(folder)} FILE",
        ]
    elif not done.whole:
        lines[1:3] = [f"  transformers has no class for this head: its {done.architecture} is the encoder alone"]
    return "\n".join([*lines, _LICENSE])


def _text(done: Exported, precision: str) -> str:
    """Return the lines that the command prints: what was written, and how to load it."""
    folder, (first, *others) = str(done.folder), done.networks
    at = "" if done.step is None else f" at step {done.step:,}"
    lines = [
        f"{folder}: the {first}{at}, {done.parameters:,} parameters in {precision}, {done.num_bytes / 1e6:,.1f} MB in all",
        f"  AutoTokenizer.from_pretrained({folder!r})",
        f"  {done.architecture}.from_pretrained({folder!r})",
    ]
    if others:
        lines.append(
            f"  discern evaluate {shell_path(folder)} --data DATA (with {', '.join(f'{folder}/{name}' for name in others)})"
        )
    return "\n".join([*lines, _LICENSE, after_export(done.folder)])
