"""The verbs that use a model: predictions, detection, scores and vectors of texts, and conversions of model folders.

Results are the values that `--json` prints. With `on_result`, the results of the texts are passed to it as soon as they are ready
instead of being returned, and memory is bounded.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

from discern.api.verb import (
    FOREIGN,
    Device,
    Listener,
    Names,
    PathLike,
    Paths,
    advanced,
    argument,
    checked_input,
    checked_text,
    listed,
    listening,
    model_folder,
    option,
    path_of,
    refuse_together,
    verb,
)
from discern.errors import ConfigError
from discern.storage.files import check_output

Task = Annotated[str | None, option("Task to use, if the fine-tuned model has several.", "NAME")]
Seed = Annotated[int | None, advanced("Seed of a fine-tuned model whose weights are used (default: the best).", "N")]
Scorer = Annotated[
    str | None,
    option(
        "Scorer: electric, rtd, pll, pll-word-l2r, two-tower, inversion or permutation-lm. Default: depends on the model.", "NAME"
    ),
]
ScoringModel = Annotated[PathLike, argument("MODEL", f"A run, an export, or {FOREIGN} with its pre-training head.")]
ResultFile = Annotated[PathLike | None, option("File to write JSON lines to, instead of stdout.", "FILE")]
OnResult = Callable[..., None] | None


@verb("Use")
def predict(
    model: Annotated[
        PathLike,
        argument(
            "MODEL",
            "Output of 'discern finetune', an export of it, or a Hugging Face model for such a task (folder or name on the Hub).",
        ),
    ],
    input: Annotated[
        PathLike,
        argument(
            "INPUT", "CSV, TSV, JSON lines, Parquet, plain text (one text per line), or the task's own format; - reads stdin."
        ),
    ],
    *,
    out: ResultFile = None,
    append: Annotated[
        bool,
        option("Write the rows of the table INPUT to --out in its own format, with columns 'prediction' and 'probability'."),
    ] = False,
    text: Annotated[str | None, option("Column of the text (default: as in the training file).", "COLUMN")] = None,
    pair: Annotated[str | None, option("Column of the second text.", "COLUMN")] = None,
    task: Task = None,
    words: Annotated[
        str | int | None, advanced("Column of the words to tag; for CoNLL columns its index, from 0.", "COLUMN")
    ] = None,
    question: Annotated[str | None, advanced("Column of the question.", "COLUMN")] = None,
    context: Annotated[str | None, advanced("Column of the text that contains the answer.", "COLUMN")] = None,
    format: Annotated[
        Literal["csv", "tsv", "jsonl", "json", "parquet", "text", "conll"] | None,
        advanced("Format of INPUT (default: recognized by name and content)."),
    ] = None,
    logits: Annotated[bool, advanced("Include the logits in the output.")] = False,
    seed: Seed = None,
    device: Device = "auto",
    precision: Annotated[Literal["float32", "bfloat16", "auto"], advanced("Floating-point type to compute in.")] = "float32",
    on_result: OnResult = None,
    progress: Listener = None,
) -> dict[str, Any]:
    """Apply a fine-tuned model to a file: one JSON line per row, in order, with its number from 0 (`row`) and its own `id`.

    Example: discern predict OUT new-reviews.csv --out predictions.jsonl

    Example: discern predict OUT new-reviews.csv --append --out labeled.csv

    Example: echo "A fine film." | discern predict OUT -

    Returns:
        `rows`, `seconds`, and without `out` the list `predictions`. For texts in memory use `discern.load(model).predict`.

    Raises:
        ConfigError, DataError: the model or the file is not suitable.
        CheckpointError: the weights are missing or damaged.
    """
    from discern.inference.prediction import predict as run

    refuse_together("--append", {"--logits": append and logits})
    listener, _ = listening(progress)
    columns = {"text": text, "pair": pair, "words": words, "question": question, "context": context}
    predictions: list[Any] = []
    values = run(
        model_folder(model, listener),
        Path(input),
        on_result or predictions.extend,
        listener,
        out=path_of(out),
        task=task,
        seed=seed,
        columns={role: str(column) for role, column in columns.items() if column is not None},
        format=format,
        logits=logits,
        device=device,
        precision=precision,
        append=append,
    )
    return values | ({"predictions": predictions} if out is None else {"out": out})


@verb("Use")
def detect(
    model: Annotated[
        PathLike, argument("MODEL", "A run, an export, or any Hugging Face ELECTRA discriminator (folder or name on the Hub).")
    ],
    input: Annotated[
        PathLike | None, argument("INPUT", "File with one text per line, plain text or JSON lines; - reads stdin.")
    ] = None,
    *,
    text: Annotated[Names | None, option("Text to check; may be repeated.", "TEXT")] = None,
    text_field: Annotated[
        str | None, option("Field that holds the text in JSON lines (default: text, in .jsonl files).", "NAME")
    ] = None,
    threshold: Annotated[
        float | None,
        option("Lowest probability at which a token is marked (default: calibrated, or 0.5).", "P", min=0.0, max=1.0),
    ] = None,
    out: ResultFile = None,
    html: Annotated[
        PathLike | None,
        option("Self-contained HTML page to write. Click a token in it to see the generator's predictions.", "PAGE"),
    ] = None,
    evaluate: Annotated[
        PathLike | None,
        option("Measure how well wrong words are found: sentences with the wrong words in [[brackets]], or JSON lines.", "FILE"),
    ] = None,
    calibrate: Annotated[
        PathLike | None,
        advanced("Find the threshold on held-out text corrupted by the generator, and store it in MODEL.", "DATA"),
    ] = None,
    precision: Annotated[
        float | None,
        advanced(
            "Precision to reach with --calibrate: the fraction of marked tokens that were really replaced (default: 0.9).",
            "P",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    corruption: Annotated[
        float | None,
        advanced("Fraction of the tokens that --calibrate masks and fills (default: 0.15).", "FRACTION", min=0.001, max=0.9),
    ] = None,
    sequences: Annotated[
        int | None,
        advanced("Number of held-out rows that --calibrate uses, evenly spaced; 0: all (default: 2000).", "N", min=0),
    ] = None,
    device: Device = "auto",
    on_result: OnResult = None,
    progress: Listener = None,
) -> dict[str, Any]:
    """Predict, for each token of a text, the probability that it was replaced. Reads stdin if neither --text nor INPUT is given.

    Example: discern detect runs/first --text "The chef ate purple elephants." --html page.html

    Example: discern detect runs/first texts.txt --out found.jsonl

    Example: discern detect runs/first --calibrate data --precision 0.9

    Returns:
        `tokens`, `offsets`, `replaced_probability`, `marked` and `threshold` of a single `text`; for several, the list `texts` of
        these; with `out` or `html`, counts. `on_result` is called with each `discern.Detection` and the threshold.

    Raises:
        ConfigError: the model has no discriminator, or an argument is wrong.
        DataError: the model or the texts cannot be read.
    """

    listener, warn = listening(progress)
    folder = model_folder(model, listener)
    given = {"precision": precision, "corruption": corruption, "sequences": sequences}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    works = {"--calibrate": calibrate, "--evaluate": evaluate, "--text": text, "INPUT": input}
    requested = [name for name, value in works.items() if value is not None]
    if len(requested) > 1:
        raise ConfigError(f"{' and '.join(requested)} are both given", hint="give only one of them")
    if calibrate is None:
        refuse_together("a detection without --calibrate", {f"--{name}": True for name in options})
    files = {"--out": out is not None, "--html": html is not None}
    if calibrate is not None:
        from discern.inference.detection import calibrate as run_calibration

        refuse_together("--calibrate", files | {"--threshold": threshold is not None, "--text-field": text_field is not None})
        return run_calibration(folder, Path(calibrate), listener, warn, **options, device=device)
    if evaluate is not None:
        from discern.inference.detection import evaluate_detection

        refuse_together("--evaluate", files)
        return evaluate_detection(
            folder, Path(evaluate), listener, warn, text_field=text_field, threshold=threshold, device=device
        )
    from discern.inference.detection import detect_texts, detection_values

    if out and html and os.path.realpath(out) == os.path.realpath(html):
        raise ConfigError(f"--out and --html both name {out}", hint="give the page another name")
    source = None if text is not None else checked_input("-" if input is None else input, "texts")
    results: list[dict[str, Any]] = []

    def show(detection: Any, value: float) -> None:
        if on_result is not None:
            on_result(detection, value)
        elif not any(files.values()):
            results.append(detection_values(detection, value))

    done = detect_texts(
        folder,
        _texts_to_check(text, source, text_field),
        show,
        listener,
        warn,
        threshold=threshold,
        out=path_of(out),
        page=path_of(html),
        source=source,
        device=device,
    )
    if any(files.values()):
        return done | {name: path for name, path in (("out", out), ("html", html)) if path is not None}
    return results[0] if text is not None and len(results) == 1 else {"texts": results, "threshold": done["threshold"]}


def _texts_to_check(text: Names | None, source: Path | None, field: str | None) -> Iterable[Any]:
    """The texts that were given, or the lines of a file."""
    from discern.inference.texts import numbered, read_texts

    if source is not None:
        return read_texts(source, field)
    if field is not None:
        raise ConfigError("--text-field is for JSON lines, but --text is given", hint="leave one of them out")
    return numbered([checked_text(each, "--text") for each in listed(text)])


@verb("Use")
def score(
    model: ScoringModel,
    file: Annotated[PathLike, argument("FILE", "File with one sentence per line; - reads stdin (default).")] = "-",
    *,
    text: Annotated[Names | None, option("Sentence to score; may be repeated.", "TEXT")] = None,
    scorer: Scorer = None,
    tokens: Annotated[bool, option("Also print the score of each token, as JSON lines.")] = False,
    out: ResultFile = None,
    device: Device = "auto",
    on_result: OnResult = None,
    progress: Listener = None,
) -> dict[str, Any]:
    """Score how likely sentences are, in nats; higher is likelier.

    Prints the score, a tab and the sentence, one line per sentence; the mean per token and per character goes to standard error.
    An empty line is an error, except at the end.

    Example: discern score runs/first sentences.txt

    Example: discern score runs/first --text "The children play." --text "The children plays."

    Example: echo "The chef ate purple elephants." | discern score runs/first --tokens

    Returns:
        The means, and without `out` the lists `scores`, `scores_per_token` and `scores_per_character`; with `tokens` also
        `tokens`. `on_result` is called with lists of `discern.Score`.

    Raises:
        ConfigError: the model does not support the scorer.
        DataError: the model or the sentences cannot be read, or a sentence is empty.
    """
    from discern.inference.scoring.scorers import CorpusScore, load_scorer, score_lines, score_values, values_of_scores
    from discern.storage.files import whole_file

    texts = [checked_text(each, "--text") for each in listed(text)]
    if texts and str(file) != "-":
        raise ConfigError("--text and FILE are both given", hint="give only one of them")
    if any(not each.strip() or len(each.splitlines()) > 1 for each in texts):
        raise ConfigError("one --text is empty or has several lines", hint='give each sentence its own: --text "A sentence."')
    source = None if texts else checked_input(file, "sentences")
    listener, warn = listening(progress)
    folder = model_folder(model, listener)
    check_output("--out", path_of(out), "scores.jsonl", folder, source)
    chosen = load_scorer(folder, scorer, device, warn=warn)
    listener.note(chosen.described)
    count, together, gathered = 0, CorpusScore(), list[Any]()
    with ExitStack() as stack:
        written = None if out is None else stack.enter_context(whole_file(Path(out)))
        for scores in score_lines(chosen, texts or source or Path("-"), listener, warn):
            count += len(scores)
            together.add(scores)
            if written is not None:
                written.writelines(json.dumps(score_values(each, tokens=tokens), ensure_ascii=False) + "\n" for each in scores)
            else:
                (on_result or gathered.extend)(scores)
    return together.values(chosen) | (
        {"sentences": count, "out": out} if out is not None else values_of_scores(gathered, tokens=tokens)
    )


@verb("Use")
def rerank(
    model: ScoringModel,
    lists: Annotated[PathLike, argument("NBEST", "N-best lists: JSON lines, or the JSON of ESPnet, mlm-scoring or Vosk.")],
    *,
    out: Annotated[PathLike, option("File to write the ranked lists to, as JSON lines.", "FILE")],
    dev: Annotated[PathLike | None, option("Other N-best lists, with references, on which to tune lambda.", "FILE")] = None,
    lambda_: Annotated[
        float | None, option("Weight of the model's score; given instead of tuning it on --dev.", "VALUE", "--lambda")
    ] = None,
    metric: Annotated[Literal["wer", "cer", "bleu"] | None, option("Metric to optimize on --dev (default: wer).")] = None,
    scorer: Scorer = None,
    max_lambda: Annotated[float | None, advanced("Largest lambda to try on --dev (default: 1).", "VALUE", min=0.0)] = None,
    length_weight: Annotated[float | None, advanced("Weight added for each token of a text.", "VALUE")] = None,
    tune_length: Annotated[bool, advanced("Also tune the length weight.")] = False,
    lowercase: Annotated[bool, advanced("Lower-case the texts before they go to the model.")] = False,
    device: Device = "auto",
    progress: Listener = None,
) -> dict[str, Any]:
    """Re-rank n-best lists by score + lambda x the model's score + length weight x tokens.

    With references, print error rates before and after.

    Example: discern rerank runs/electric test.jsonl --dev dev.jsonl --out reranked.jsonl

    Returns:
        Counts, the weights, and each metric before and after.

    Raises:
        ConfigError: options contradict each other, or the model does not support the scorer.
        DataError: a file is not a list of n-best lists.
    """
    from discern.inference.scoring.rerank import rerank as run

    listener, warn = listening(progress)
    if dev is None:
        tuning = {"--tune-length": tune_length, "--max-lambda": max_lambda is not None, "--metric": metric is not None}
        refuse_together("a re-ranking without --dev", tuning)
    elif not tune_length:
        refuse_together("--dev", {"--lambda": lambda_ is not None})
    if not math.isfinite((lambda_ or 0.0) + (max_lambda or 0.0) + (length_weight or 0.0)):
        raise ConfigError("a weight is not a finite number", hint="for example --lambda 0.5")
    refuse_together("--lambda", {"--max-lambda": lambda_ is not None and max_lambda is not None})
    refuse_together("--tune-length", {"--length-weight": tune_length and length_weight is not None})
    values = run(
        model_folder(model, listener),
        Path(lists),
        listener,
        warn,
        out=Path(out),
        dev=path_of(dev),
        weight=lambda_,
        max_weight=1.0 if max_lambda is None else max_lambda,
        length_weight=length_weight or 0.0,
        tune_length=tune_length,
        metric=metric or "wer",
        scorer=scorer,
        lowercase=lowercase,
        device=device,
    )
    return values | {"out": out}


@verb("Use")
def fill(
    model: Annotated[
        PathLike,
        argument("MODEL", "A run, an export, or a Hugging Face model that predicts masked tokens (folder or name on the Hub)."),
    ],
    text: Annotated[str, argument("TEXT", "Text with [MASK] in place of each token to predict.")],
    *,
    top: Annotated[int, option("Number of predictions per mask.", "N", min=1)] = 5,
    device: Device = "auto",
    progress: Listener = None,
) -> dict[str, Any]:
    """Print the most likely tokens at each [MASK] in a text, with their probabilities.

    Example: discern fill runs/first "The [MASK] sat on the mat."

    Returns:
        `predictions`: `token`, `text` and `probability` of each; of several masks, a list for each.

    Raises:
        ConfigError: the text has no mask, or the model predicts no tokens.
    """
    from discern.inference.filling import fill as run, fill_values

    listener, warn = listening(progress)
    text = checked_text(text, "TEXT")
    return fill_values(text, run(model_folder(model, listener), text, top, warn, device, listener.note))


@verb("Use")
def embed(
    model: Annotated[
        PathLike,
        argument(
            "MODEL",
            "Output of 'discern finetune --task pairs', an export of it, or any run, export or Hugging Face model (folder or "
            "name on the Hub).",
        ),
    ],
    input: Annotated[
        PathLike,
        argument("INPUT", "Plain text (one text per line), JSON lines, CSV, TSV or Parquet; - reads stdin (default)."),
    ] = "-",
    *,
    out: Annotated[
        PathLike | None,
        option(
            "Write vectors to FILE (.npy, .parquet or .jsonl), and a record of the model to FILE.json beside it, such as "
            "vectors.npy.json. Default: JSON lines on stdout.",
            "FILE",
        ),
    ] = None,
    text: Annotated[str | None, option("Column or field of the text (default: detected).", "COLUMN")] = None,
    search: Annotated[
        PathLike | None, option("For each text, print the nearest of these vectors instead, with their texts.", "VECTORS")
    ] = None,
    top: Annotated[int | None, option("Number of vectors that --search finds (default: 5).", "N", min=1)] = None,
    pooling: Annotated[
        Literal["auto", "mean", "mean-all", "cls"],
        advanced(
            "auto: as the model was trained, otherwise mean. mean: mean of the states of the text's tokens. mean-all: [CLS] and "
            "[SEP] included. cls: the state of [CLS]."
        ),
    ] = "auto",
    normalize: Annotated[
        bool | None, advanced("Scale vectors to length 1, or don't (default: as the model was trained).")
    ] = None,
    dim: Annotated[
        int | None,
        advanced(
            "Keep only this many components of each vector, the first ones (task.matryoshka trains a model for this).", "N", min=1
        ),
    ] = None,
    device: Device = "auto",
    on_result: OnResult = None,
    progress: Listener = None,
) -> dict[str, Any]:
    """Turn texts into vectors, one per text, in order.

    Example: discern embed MODEL texts.txt --out vectors.npy

    Example: discern embed MODEL questions.txt --search vectors.npy --top 3

    Returns:
        A record of the model and the texts, and without `out` the list `vectors`, or `results` of a search. For texts in memory,
        use `discern.load(model).encode(texts)`.

    Raises:
        ConfigError: there is no such size, column or format.
        DataError: the input cannot be read, or the stored vectors are of another model.
    """
    from discern.inference.embedding import embed as run

    listener, warn = listening(progress)
    refuse_together("--search", {"--out": search is not None and out is not None})
    source = checked_input(input, "texts")
    refuse_together("an embedding without --search", {"--top": top is not None and search is None})
    results: list[dict[str, Any]] = []
    values = run(
        model_folder(model, listener),
        source,
        on_result or results.extend,
        listener,
        out=path_of(out),
        pooling=pooling,
        normalize=normalize,
        size=dim,
        column=text,
        search=path_of(search),
        top=top or 5,
        device=device,
        warn=warn,
    )
    return values | ({"out": out} if out is not None else {"vectors" if search is None else "results": results})


@verb("Use")
def export(
    model: Annotated[
        PathLike,
        argument(
            "MODEL",
            "Folder of a run, whose newest intact checkpoint is exported, or a folder written by 'discern finetune', 'discern "
            "import' or 'discern export', or its name on the Hub.",
        ),
    ],
    *,
    out: Annotated[PathLike, option("New folder, or an earlier export, which is replaced.", "DIR")],
    as_: Annotated[
        Literal["electra", "bert", "modernbert"] | None,
        option(
            "Architecture of the exported model (default: its own). An ELECTRA whose embeddings are as wide as its hidden states "
            "can be exported as bert, without the head of a discriminator, for servers that do not support ELECTRA.",
            None,
            "--as",
        ),
    ] = None,
    onnx: Annotated[
        bool, option("Also write model.onnx, which onnxruntime runs without torch (needs discern-nlp[onnx]).")
    ] = False,
    int8: Annotated[
        bool,
        option("With --onnx: store its matrices in eight bits, and report in README.md how much accuracy this costs."),
    ] = False,
    sentence_transformers: Annotated[bool, option("Also write the files of a sentence-transformers model.")] = False,
    network: Annotated[
        str | None,
        option("Network to export: discriminator (default) or generator; for a run of 'mlm', encoder.", "NAME"),
    ] = None,
    task: Task = None,
    precision: Annotated[Literal["float32", "bfloat16", "float16"], option("Data type of the stored weights.")] = "float32",
    all_networks: Annotated[
        bool, advanced("Also export the generator, to a subfolder, so that 'discern evaluate' accepts DIR.")
    ] = False,
    push_to_hub: Annotated[
        str | None,
        option(
            "Also upload DIR to this repository of the Hugging Face Hub, after 'hf auth login' (needs discern-nlp[hf]). A new "
            "repository is private; its settings on the Hub make it public. REVISION is a branch.",
            "USER/NAME[@REVISION]",
            "--push",
        ),
    ] = None,
    seed: Seed = None,
    pooling: Annotated[
        Literal["mean", "mean-all", "cls"] | None,
        advanced(
            "Vector of a text: mean of its tokens' states without [CLS] and [SEP] (mean, the default), with them (mean-all, for "
            "servers other than sentence-transformers), or the state of [CLS] (cls)."
        ),
    ] = None,
    normalize: Annotated[bool, advanced("Scale text embeddings to length 1.")] = False,
    max_loss: Annotated[
        float | None,
        advanced(
            "With --int8: fail, and write nothing, if the task's score drops by more than this, or, where there is no score, the "
            "agreement with float32.",
            "FRACTION",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    compare_on: Annotated[
        PathLike | None,
        advanced(
            "With --int8: texts to compare on, one per line (default: English sentences); for a classifier or other fine-tuned "
            "predictor, labeled examples (default: those that it was evaluated on, if the file is still there).",
            "FILE",
        ),
    ] = None,
    progress: Listener = None,
) -> dict[str, Any]:
    """Export a network of a run, or a fine-tuned model, as a folder that transformers loads, with tokenizer and model card.

    Example: discern export runs/first --out my-encoder

    Example: discern export OUT --out my-classifier

    Example: discern export runs/first --out served --onnx --int8 --max-loss 0.01

    Example: discern export runs/first --out my-encoder --push USER/NAME

    Returns:
        `out`, the folder, and `architecture`, the class of transformers that loads it, `parameters`, `bytes` and others; `pushed`
        is its address on the Hugging Face Hub.

    Raises:
        ConfigError, DataError: the model has no such network or task, or `out` is not an earlier export.
        CheckpointError, NumericsError: the weights are missing, damaged, or not finite.
    """
    from discern.finetuning.evaluate import labeled_examples
    from discern.model_files.export import export as run
    from discern.model_files.serving import Serving

    listener, warn = listening(progress)
    texts = path_of(compare_on)
    forms = as_, sentence_transformers, pooling, normalize, onnx, int8, max_loss, texts, labeled_examples
    done = run(
        model_folder(model, listener),
        out=Path(out),
        network=network,
        all_networks=all_networks,
        task=task,
        seed=seed,
        precision=precision,
        serving=Serving(*forms),
        push_to_hub=push_to_hub,
        progress=listener,
        warn=warn,
    )
    return done.values() | {"precision": precision}


@verb("Use", name="import")
def import_model(
    sources: Annotated[
        Paths,
        argument(
            "SOURCE",
            f"The model: {FOREIGN}; or two, the discriminator and the generator of one model; or a checkpoint of the released "
            "TensorFlow code: model.ckpt-N.index, or its folder.",
        ),
    ],
    *,
    out: Annotated[PathLike, option("New folder, or an earlier import, which is replaced.", "DIR")],
    tokenizer: Annotated[
        PathLike | None,
        option("A tokenizer.json, vocab.txt or SentencePiece model, or a folder (default: that of SOURCE).", "PATH"),
    ] = None,
    lowercase: Annotated[
        bool | None,
        option(
            "Whether to lower-case texts (default: as the files specify; for a bare vocab.txt, inferred from its entries).",
            None,
            "--lowercase/--cased",
        ),
    ] = None,
    heads: Annotated[
        int | None, advanced("Attention heads of a TensorFlow model (default: hidden size / 64).", "N", min=1)
    ] = None,
    progress: Listener = None,
) -> dict[str, Any]:
    """Convert a Hugging Face or TensorFlow model, with its tokenizer, to a folder that the other commands accept as a model.

    TensorFlow is not required.

    Example: discern import electra-small/model.ckpt-1000000.index --out models/theirs

    Example: discern import hub/discriminator hub/generator --out models/both

    Returns:
        `out`, the folder, with `networks`, `architecture`, `parameters`, what was `left_out`, and others.

    Raises:
        ConfigError, DataError: the source is not a model, or cannot be expressed.
    """
    from discern.model_files.import_ import import_model as run

    listener, warn = listening(progress)
    paths = [model_folder(each, listener) for each in listed(sources)]
    done = run(paths, out=Path(out), tokenizer=path_of(tokenizer), lowercase=lowercase, heads=heads, progress=listener, warn=warn)
    return done.values()
