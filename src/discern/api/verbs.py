"""The commands as functions. Keyword arguments have the names of the options; results are the values that `--json` prints.

Settings are a mapping by dotted key, `{"train.max_steps": 1000}`, or nested, `{"train": {"max_steps": 1000}}`. Progress
messages go to the logger `discern`: `logging.basicConfig(level=logging.INFO)` shows them. For a progress display, pass an
object with the methods of `discern.progress.Progress`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from discern.api.arguments import Logged, checks_choices, requested_tasks
from discern.config.schema import toml_value
from discern.data import prepare as preparing
from discern.data.curation.contamination import EvaluationFiles
from discern.data.executors import EngineName, available_cores
from discern.data.job import PrepareOptions
from discern.data.languages import SegmenterName
from discern.data.prepare import warnings_of
from discern.data.sources.documents import CorpusOptions, DocumentRule
from discern.data.tokenizer.choice import TokenizerChoice
from discern.data.tokenizer.training import TokenizerKind
from discern.errors import ConfigError
from discern.finetuning import run as finetuning
from discern.finetuning.evaluate import evaluate_finetuned, labeled_examples
from discern.finetuning.settings import Recipe
from discern.inference import predict as prediction
from discern.inference.prediction_input import InputFormat
from discern.model_files.export import export as export_model
from discern.model_files.folder import open_model
from discern.model_files.hub import local_model
from discern.model_files.onnx import VectorPooling
from discern.model_files.serving import Serving
from discern.pretraining import adapt as adapting
from discern.pretraining import evaluate as held_out
from discern.pretraining import run as pretraining
from discern.pretraining.estimate import estimate
from discern.pretraining.resume import Resume
from discern.pretraining.run import DataSets
from discern.pretraining.warm_start import AddedTokens
from discern.progress import Progress
from discern.tasks.base import Prediction

PathLike = str | Path
Settings = Mapping[str, Any]


@checks_choices
def prepare(
    inputs: PathLike | Sequence[PathLike],
    *,
    out: PathLike,
    tokenizer: PathLike | None = None,
    train_tokenizer: TokenizerKind | None = None,
    vocab_size: int | None = None,
    lowercase: bool | None = None,
    keep_accents: bool = False,
    documents: DocumentRule = "auto",
    text_field: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    encoding: str | None = None,
    language: str | None = None,
    license: str | None = None,
    segmenter: SegmenterName | None = None,
    heldout: float = 0.01,
    seed: int = 0,
    workers: int | None = None,
    against: PathLike | Sequence[PathLike] = (),
    against_field: str | Sequence[str] = (),
    filters: str | Sequence[str] = (),
    near_duplicates: float | None = None,
    engine: EngineName = "local",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make a tokenized data set from text, as `discern prepare` does.

    Args:
        inputs: files, folders, glob patterns, or `hf:NAME`.
        out: output folder of the data set.
        tokenizer: a tokenizer.json, a vocab.txt or a model folder; None: train one.
        train_tokenizer: kind of tokenizer to train on the input, with `vocab_size` entries: 'wordpiece', 'bpe' or 'unigram'.
        keep_accents: whether a WordPiece that lower-cases keeps accents, which it removes otherwise, as in BERT.
        text_field: field or column of the text; `PATTERN:NAME` for the inputs that match a pattern.
        exclude: patterns of files to leave out of folders and archives.
        encoding: encoding of the text; None: UTF-8, and detected where a file is not.
        language: language code of the text. If neither tokenizer argument is given, a tokenizer that suits it is trained.
        license: license of the text, for the model cards of models trained on it.
        against: evaluation files to look for in the text, for `overlap` in the result and the model cards.
        against_field: fields or columns of those files to read; empty: all.
        filters: rules that leave out documents, such as 'words:20' or 'gopher-quality'.
        near_duplicates: similarity, such as 0.8, at which a document is removed as a near-duplicate of an earlier one.
        engine: where the work runs: in processes on this machine ('local') or on a Ray cluster ('ray').

    Returns:
        Counts of the data set: `documents`, `tokens`, `vocab_size`, `unknown_fraction` and others.

    Raises:
        ConfigError: the arguments contradict each other, or a value is out of range.
        DataError: the input cannot be read, or `out` holds something else.
    """
    listener = progress or Logged()
    asked = TokenizerChoice(_model(tokenizer, listener), train_tokenizer, vocab_size, lowercase, keep_accents)
    choice, chosen, code = preparing.in_language(language, asked, segmenter, lambda line: listener.note(f"warning: {line}"))
    paths, fields = _listed(against), _listed(against_field)
    if fields and not paths:
        raise ConfigError("against_field names fields of evaluation files, but none is given", hint="add against=FILE")
    options = PrepareOptions(
        chosen,
        heldout,
        seed,
        workers=available_cores() if workers is None else workers,
        near_duplicates=near_duplicates,
        filters=tuple(_listed(filters)),
        language=code,
        license=license,
    )
    report = preparing.prepare(
        tuple(map(str, _listed(inputs))),
        out=Path(out),
        tokenizer=choice,
        corpus=CorpusOptions(
            documents, text_fields=tuple(_listed(text_field)), exclude=tuple(_listed(exclude)), encoding=encoding
        ),
        options=options,
        overwrite=overwrite,
        against=EvaluationFiles([Path(each) for each in paths], fields) if paths else None,
        engine=engine,
        progress=listener,
    )
    for line in (*map(str, report.manifest.problems), *warnings_of(report.manifest)):
        listener.note(f"warning: {line}")
    return report.values()


@checks_choices
def pretrain(
    config: PathLike | None = None,
    *,
    data: DataSets,
    out: PathLike,
    data_temperature: float | None = None,
    preset: str | None = None,
    settings: Settings | None = None,
    init_from: PathLike | None = None,
    decay_from: PathLike | None = None,
    resume: Resume = "auto",
    device: str = "auto",
    dry_run: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Pre-train an encoder, as `discern pretrain` does. An interrupted run in `out` is resumed exactly where it stopped.

    Args:
        config: TOML file with settings that override the preset, or the folder of a run.
        data: data set, as made by `prepare`; or several to mix: a list, weighted by size, or shares of the tokens:
            `{"books": 0.7, "news": 0.3}`.
        out: folder of the run.
        data_temperature: without weights, a data set of n tokens has the share p ~ n^(1/T); None: 1.
        preset: name of the recipe to start from; `discern config presets` lists them.
        settings: settings that override preset and file: `{"train.max_steps": 1000}`.
        init_from: model whose weights initialize the run; no preset is needed then.
        decay_from: run with schedule 'wsd' or 'constant', or one of its checkpoints, to continue in `out` while the learning rate
            decays over `optimizer.decay_steps`; the settings are those of the run.
        resume: 'auto' resumes an existing run, 'never' starts over (the old run is moved aside), 'must' requires an existing run.
        device: 'auto', 'cpu', 'cuda', 'cuda:1', ...
        dry_run: don't train; return `parameters`, `flops`, `memory_bytes` and other estimates.

    Returns:
        The last record of the run's metrics: `step`, `loss`, `heldout_loss` and others; losses are means in nats. On ranks of
        a distributed run that don't write metrics, an empty dictionary.

    Raises:
        ConfigError, DataError: the arguments, settings or data are invalid; nothing has been written.
        CheckpointError, NumericsError: training had to stop; the last good checkpoint is kept.
        KeyboardInterrupt: Ctrl-C was pressed; the run is saved, and the same call resumes it.
    """
    listener = progress or Logged()
    if data_temperature is not None:
        settings = {**(settings or {}), "data.mixture_temperature": data_temperature}
    options: dict[str, Any] = {
        "data": data,
        "out": Path(out),
        "preset": preset,
        "overrides": overrides_of(settings),
        "resume": resume,
        "init_from": _model(init_from, listener),
        "decay_from": _path(decay_from),
    }
    if dry_run:
        return estimate(pretraining.plan(config=_path(config), **options, warn=lambda _: None), device=device).values
    return pretraining.pretrain(_path(config), **options, device=device, progress=listener) or {}


@checks_choices
def adapt(
    model: PathLike,
    *,
    data: DataSets,
    out: PathLike,
    data_temperature: float | None = None,
    replay: PathLike | None = None,
    replay_share: float | None = None,
    add_tokens: int | PathLike | None = None,
    config: PathLike | None = None,
    settings: Settings | None = None,
    resume: Resume = "auto",
    sequences: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Continue the pre-training of a model on your own text, as `discern adapt` does.

    Args:
        model: a run, an export, or a Hugging Face model.
        data: data set of your text, made with the model's tokenizer; or, without `replay`, several, as for `pretrain`.
        out: folder of the new run.
        data_temperature: as for `pretrain`.
        replay: data set of general text, to mix into the training and to measure forgetting.
        replay_share: share of the general text in the tokens to train on; 0: only evaluate on it; None: 0.2.
        add_tokens: number of words of your text to add to the vocabulary, or a file with the words, one per line.
        sequences: number of held-out rows to evaluate on; 0: all.

    Returns:
        `step`, and the held-out metrics `before` and `after`, for each data set by its name.

    Raises:
        ConfigError, DataError: the arguments, settings or data are invalid; nothing has been trained.
        CheckpointError, NumericsError: training had to stop; the last good checkpoint is kept.
    """
    listener = progress or Logged()
    added = None if add_tokens is None else AddedTokens.of(str(add_tokens))
    if data_temperature is not None:
        settings = {**(settings or {}), "data.mixture_temperature": data_temperature}
    adapted = adapting.adapt(
        local_model(model, listener.note),
        data=data,
        out=Path(out),
        config=_path(config),
        overrides=overrides_of(settings),
        replay=_path(replay),
        replay_share=replay_share,
        added=added,
        resume=resume,
        device=device,
        sequences=sequences,
        progress=listener,
    )
    return adapted or {}


@checks_choices
def evaluate(
    model: PathLike,
    *,
    data: PathLike | None = None,
    sequences: int = 0,
    batch_size: int | None = None,
    task: str | None = None,
    seed: int | None = None,
    device: str = "auto",
    precision: Literal["float32", "bfloat16"] = "float32",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluate a pre-trained model on held-out text, or a fine-tuned model on a labeled file, as `discern evaluate` does.

    Args:
        model: a run, an export with all its networks, a fine-tuned model, or an export of one.
        data: data set whose held-out split is used (default: that of the run); for a fine-tuned model, a labeled file.
        sequences: number of held-out rows to evaluate a pre-trained model on; 0: all.
        batch_size: number of rows that a pre-trained model reads at a time; None: 32.
        task: task of a fine-tuned model with several tasks.
        seed: seed of a fine-tuned model whose weights are used; None: the best.

    Returns:
        The metrics by name; for a fine-tuned model `metric`, `score`, `metrics` and `loss`.

    Raises:
        ConfigError, DataError: the model or the data is not suitable.
        CheckpointError: weights are missing or damaged.
    """
    listener = progress or Logged()
    folder = local_model(model, listener.note)
    if open_model(folder, warn=listener.note).has_task_head:
        if sequences or batch_size is not None:
            raise ConfigError(
                f"sequences and batch_size are for pre-trained models, but {model} is fine-tuned", hint="leave them out"
            )
        return evaluate_finetuned(
            folder, _path(data), task=task, seed=seed, device=device, precision=precision, progress=listener
        )
    if task is not None or seed is not None:
        raise ConfigError(f"task and seed are for fine-tuned models, but {model} is not one", hint="leave them out")
    return held_out.evaluate(
        folder,
        data=_path(data),
        sequences=sequences,
        batch_size=32 if batch_size is None else batch_size,
        device=device,
        precision=precision,
        progress=listener,
        warn=listener.note,
    )


@checks_choices
def finetune(
    model: PathLike,
    *,
    out: PathLike,
    task: str | Sequence[str] = (),
    data: PathLike | Sequence[PathLike] = (),
    train: PathLike | None = None,
    dev: PathLike | None = None,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    label_separator: str | None = None,
    words: str | int | None = None,
    tags: str | int | None = None,
    question: str | None = None,
    context: str | None = None,
    answer: str | None = None,
    config: PathLike | None = None,
    settings: Settings | None = None,
    recipe: Recipe = "auto",
    seeds: int = 1,
    untrained: bool = False,
    tokenizer: PathLike | None = None,
    sweep_rates: bool = False,
    baselines: bool = True,
    overwrite: bool = False,
    debug: bool = False,
    device: str = "auto",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Fine-tune an encoder on named tasks or on a labeled file, as `discern finetune` does.

    Args:
        model: a run, an export, a Hugging Face folder, or the name of a preset.
        out: output folder; interrupted work in it is resumed.
        task: name of a task, or several to train jointly; 'pairs' trains text embeddings on `train`.
        data: folder with the files of the task, one for each task.
        train: your own labeled file to train on, instead of a task.
        dev: file to evaluate on, for pairs also a folder of queries and documents or a file in its `qrels`; None: a part of
            `train` is held out.
        text, pair, label: columns of your own files, for classification and regression; columns that are not given
            are recognized by their names.
        label_separator: mark between several labels in one cell.
        words, tags: columns for tagging; in a file with one word per line, column numbers from 0.
        question, context, answer: columns for question answering.
        settings: settings that override the recipe: `{"finetune.epochs": 5}`.
        recipe: 'auto' adapts the length of training to the data and uses an answer head that transformers has; 'paper' and
            'google' (the released code) use their own lengths and the joint answer head.
        seeds: number of times to train; the results include median and spread.
        sweep_rates: choose the learning rate with short trial runs first.
        baselines: also evaluate simple predictors (TF-IDF, a perceptron, ...) on the same examples.
        overwrite: replace another fine-tuning in `out`.
        debug: use only a hundred examples of each file.

    Returns:
        The content of results.json: `task`, `metric`, `median`, `scores`, `metrics`, `failed_seeds`, `baselines` and others.

    Raises:
        ConfigError, DataError: the arguments, settings or data are invalid; nothing has been written.
        CheckpointError: the disk is full, or a checkpoint is damaged.
        KeyboardInterrupt: Ctrl-C was pressed; the work is saved, and the same call resumes it.
    """
    own: dict[str, object] = {"train": train, "dev": dev, "text": text, "pair": pair, "label": label}
    own |= {"label_separator": label_separator, "words": words, "tags": tags}
    own |= {"question": question, "context": context, "answer": answer}
    tasks, files = requested_tasks(_listed(task), [Path(each) for each in _listed(data)], own)
    return finetuning.finetune(
        str(model),
        out=Path(out),
        progress=progress or Logged(),
        tasks=tasks,
        config=_path(config),
        overrides=(
            *files,
            *(("finetune.rate_search=true",) if sweep_rates else ()),
            *overrides_of(settings),
        ),
        recipe=recipe,
        seeds=seeds,
        untrained=untrained,
        tokenizer=_path(tokenizer),
        overwrite=overwrite,
        debug=debug,
        baselines=baselines,
        device=device,
    )


@checks_choices
def predict(
    model: PathLike,
    input: PathLike,
    *,
    task: str | None = None,
    seed: int | None = None,
    text: str | None = None,
    pair: str | None = None,
    words: str | int | None = None,
    question: str | None = None,
    context: str | None = None,
    format: InputFormat | None = None,
    logits: bool = False,
    device: str = "auto",
    precision: Literal["float32", "bfloat16", "auto"] = "float32",
    progress: Progress | None = None,
) -> list[Prediction]:
    """Return predictions for every row of a file, as `discern predict` writes them.

    For texts in memory, use `discern.load(model).predict(texts)`.

    Args:
        model: a fine-tuned model, its export, or a Hugging Face model for such a task.
        input: a table, a text file with one row per line, or a file in the task's own format.
        text, pair, words, question, context: columns of a table; by default those of the training file.

    Raises:
        ConfigError, DataError: the model or the file is not suitable.
        CheckpointError: the weights are missing or damaged.
    """
    named = {"text": text, "pair": pair, "words": words, "question": question, "context": context}
    columns = {role: str(column) for role, column in named.items() if column is not None}
    listener = progress or Logged()
    folder = local_model(model, listener.note)
    found: list[Prediction] = []
    prediction.predict(
        folder,
        Path(input),
        found.extend,
        listener,
        task=task,
        seed=seed,
        columns=columns,
        format=format,
        logits=logits,
        device=device,
        precision=precision,
    )
    return found


@checks_choices
def export(
    model: PathLike,
    *,
    out: PathLike,
    network: str | None = None,
    all_networks: bool = False,
    task: str | None = None,
    seed: int | None = None,
    precision: Literal["float32", "bfloat16", "float16"] = "float32",
    form: str | None = None,
    sentence_transformers: bool = False,
    pooling: VectorPooling | None = None,
    normalize: bool = False,
    onnx: bool = False,
    int8: bool = False,
    max_loss: float | None = None,
    compare_on: PathLike | None = None,
    progress: Progress | None = None,
) -> Path:
    """Export a network of a run, or a fine-tuned model, as a folder that transformers loads, as `discern export` does.

    Args:
        model: a run, an export, or a fine-tuned model.
        out: new or empty folder, or an earlier export, which is replaced.
        network: network of a run; None: the one to fine-tune.
        all_networks: also export the other networks of a run, each to a subfolder of its name.
        task: task of a fine-tuned model with several tasks.
        seed: seed of a fine-tuned model whose weights are exported; None: the best.
        precision: data type of the stored weights.
        form: architecture of the exported model, `--as` of the command, such as 'bert'; None: its own.
        sentence_transformers: also write the files of a sentence-transformers model, with `pooling` ('mean', 'mean-all' or
            'cls') and `normalize`.
        onnx: also write model.onnx, with matrices of eight bits if `int8`.
        max_loss: largest drop that eight bits may cause in the task's score, or in the agreement with float32; more is an error.
        compare_on: texts, or labeled examples for a fine-tuned model, to compare eight bits with float32 on.

    Returns:
        The folder.

    Raises:
        ConfigError, DataError: the model has no such network or task, or `out` is not an earlier export.
        CheckpointError, NumericsError: the weights are missing, damaged, or not finite.
    """
    listener = progress or Logged()
    texts = _path(compare_on)
    forms = form, sentence_transformers, pooling, normalize, onnx, int8, max_loss, texts, labeled_examples
    done = export_model(
        Path(model),
        out=Path(out),
        network=network,
        all_networks=all_networks,
        task=task,
        seed=seed,
        precision=precision,
        serving=Serving(*forms),
        progress=listener,
        warn=listener.note,
    )
    return done.folder


def overrides_of(settings: Settings | None) -> tuple[str, ...]:
    """Convert settings to `--set` arguments ("KEY=VALUE", with values in TOML syntax).

    Raises:
        ConfigError: a value has no representation in TOML.
    """
    found: list[str] = []
    for key, value in (settings or {}).items():
        if isinstance(value, Mapping):
            found += [f"{key}.{override}" for override in overrides_of(value)] or [f"{key}={{}}"]
            continue
        try:
            found.append(f"{key}={toml_value(value.item() if isinstance(value, np.generic) else value)}")
        except TypeError:
            raise ConfigError(
                f"{key} is of the type {type(value).__name__}, expected a string, a number, True, False or a list of these",
                hint="leave it out for its default",
            ) from None
    return tuple(found)


def _listed(given: Any) -> list[Any]:
    """One value, several or None, as a list."""
    return [given] if isinstance(given, str | Path) else list(given or ())


def _path(path: PathLike | None) -> Path | None:
    return None if path is None else Path(path)


def _model(path: PathLike | None, listener: Progress) -> Path | None:
    """Return the folder of a model, which may be given by its name on the Hugging Face Hub."""
    return None if path is None else local_model(path, listener.note)
