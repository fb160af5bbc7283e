"""`discern export`: write networks of a run, or a fine-tuned model, as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from discern.cli.console import JsonOption, command
from discern.cli.outputs import after_export, shell_path

if TYPE_CHECKING:
    from discern.model_files.export import Exported

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
        from discern.finetuning.evaluate import labeled_examples
        from discern.model_files.export import export as export_model
        from discern.model_files.serving import Serving

        forms = form, sentence_transformers, pooling, normalize, onnx, int8, max_loss, compare_on, labeled_examples
        done = export_model(
            run,
            out=out,
            network=network,
            all_networks=all_networks,
            task=task,
            seed=seed,
            precision=precision,
            serving=Serving(*forms),
            progress=console.progress,
            warn=console.warn,
        )
        of_run = {"network": done.networks[0], "networks": done.networks, "step": done.step}
        values: dict[str, Any] = {
            "out": done.folder,
            **(of_run if done.task is None else {"task": done.task, "seed": done.seed}),
            "architecture": done.loads_as,
            "parameters": done.parameters,
            "precision": precision,
            "bytes": done.num_bytes,
            **({} if done.parity is None else {"onnx": done.parity}),
        }
        console.result(values, text=_text(done, precision, sentence_transformers))


def _text(done: Exported, precision: str, sentence_transformers: bool) -> str:
    """The lines that the command prints: what was written, and how to load it."""
    folder, quoted = str(done.folder), shell_path(done.folder)
    at = "" if done.step is None else f" at step {done.step:,}"
    what = f"the {done.networks[0]}{at}" if done.task is None else f"{done.task}, seed {done.seed}"
    lines = [f"{folder}: {what}, {done.parameters:,} parameters in {precision}, {done.num_bytes / 1e6:,.1f} MB in all"]
    if done.kind == "vectors":
        lines += [
            f"  SentenceTransformer({folder!r})",
            f"  discern.load({folder!r}).encode(texts), or discern embed {quoted} FILE",
        ]
    elif not done.whole:
        lines.append(f"  transformers has no class for this head: its {done.loads_as} is the encoder alone")
    else:
        lines += [f"  AutoTokenizer.from_pretrained({folder!r})", f"  {done.loads_as}.from_pretrained({folder!r})"]
    if done.task is not None and done.kind != "vectors":
        lines.append(f"  discern.load({folder!r}).predict(texts), or discern predict {quoted} FILE")
    if others := done.networks[1:]:
        lines.append(f"  discern evaluate {quoted} --data DATA (with {', '.join(f'{folder}/{name}' for name in others)})")
    lines.append(_LICENSE)
    if done.task is None:
        lines.append(after_export(done.folder))
    if sentence_transformers and done.kind != "vectors":
        lines.append(f"  SentenceTransformer({folder!r})")
    if (parity := done.parity) is not None:
        kind = "int8" if "int8" in parity["file_bytes"] else "float32"
        lines.append(
            f"  {done.folder / 'model.onnx'}: {kind}, {parity['file_bytes'][kind] / 1e6:.1f} MB; agreement with the model "
            f"{parity['agreement']:.4f}, largest difference {parity['largest_difference']:.2g} ({parity['rows']:,} rows: "
            f"{parity['compared_on']})"
        )
        if parity["scores"]:
            lines.append(f"  {parity['metric']}: {parity['scores']['onnx']:.4f}, of the model {parity['scores']['torch']:.4f}")
    return "\n".join(lines)
