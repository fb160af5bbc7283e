"""The commands as functions: keyword arguments of the same names as the options, and the values of `--json` as results.

Settings are a mapping by dotted key, `{"train.max_steps": 1000}`, or nested, `{"train": {"max_steps": 1000}}`. Progress
messages go to the logger `discern`: `logging.basicConfig(level=logging.INFO)` shows them. For a progress display, pass an
object with the methods of `discern.progress.Progress`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tomli_w

from discern.data.build import BuildOptions
from discern.data.corpus import CorpusOptions, DocumentRule
from discern.data.tokenizer_choice import TokenizerChoice
from discern.data.tokenizer_training import TokenizerKind
from discern.data.words import SegmenterName
from discern.errors import ConfigError
from discern.interop.hub import local_model
from discern.progress import Logged, Progress
from discern.tasks.base import Prediction
from discern.workflows import adapt as adapting
from discern.workflows import evaluate as held_out
from discern.workflows import export as of_run
from discern.workflows import finetune as finetuning
from discern.workflows import predict as prediction
from discern.workflows import prepare as preparing
from discern.workflows import pretrain as pretraining
from discern.workflows.adapt_vocabulary import AddedTokens
from discern.workflows.evaluate_finetuned import JudgeRequest, judge
from discern.workflows.export_again import export_again, is_export
from discern.workflows.export_finetuned import TaskExportRequest, export_task
from discern.workflows.finetune_settings import Recipe
from discern.workflows.plan import plan
from discern.workflows.prediction_input import InputFormat
from discern.workflows.request import Replay
from discern.workflows.runs import is_finetuned
from discern.workflows.task_models import holds_task

PathLike = str | Path
Settings = Mapping[str, Any]


def prepare(
    inputs: PathLike | Sequence[PathLike],
    *,
    out: PathLike,
    tokenizer: PathLike | None = None,
    train_tokenizer: TokenizerKind | None = None,
    vocab_size: int | None = None,
    lowercase: bool | None = None,
    documents: DocumentRule = "auto",
    text_field: str | None = None,
    language: str | None = None,
    license: str | None = None,
    segmenter: SegmenterName | None = None,
    heldout: float = 0.01,
    seed: int = 0,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make a tokenized data set from text, as `discern prepare` does.

    Args:
        inputs: files, folders, patterns, or `hf:NAME`.
        out: folder of the data set.
        tokenizer: a tokenizer.json, a vocab.txt or a model folder; or else:
        train_tokenizer: 'wordpiece', 'bpe' or 'unigram', trained on the input with `vocab_size` entries.
        language: code of the language of the text; without a tokenizer, one that suits it is trained.
        license: license of the text, stated in the cards of models trained on it.

    Returns:
        Counts of the data set: `documents`, `tokens`, `vocab_size`, `unknown_fraction` and others.

    Raises:
        ConfigError: the arguments contradict each other.
        DataError: the input cannot be read, or `out` holds something else.
    """
    listener = progress or Logged()
    asked = TokenizerChoice(_model(tokenizer, listener), train_tokenizer, vocab_size, lowercase)
    choice, chosen, code = preparing.in_language(language, asked, segmenter, lambda line: listener.note(f"warning: {line}"))
    named = [inputs] if isinstance(inputs, str | Path) else inputs
    request = preparing.PrepareRequest(
        inputs=tuple(map(str, named)),
        out=Path(out),
        tokenizer=choice,
        corpus=CorpusOptions(documents, text_field),
        build=BuildOptions(chosen, heldout, seed, workers=workers or preparing.available_cores()),
        overwrite=overwrite,
        language=code,
        license=license,
    )
    report = preparing.prepare(request, listener)
    for line in (*map(str, report.manifest.problems), *preparing.warnings_of(report.manifest)):
        listener.note(f"warning: {line}")
    return report.values()


def pretrain(
    config: PathLike | None = None,
    *,
    data: PathLike,
    out: PathLike,
    preset: str | None = None,
    settings: Settings | None = None,
    init_from: PathLike | None = None,
    resume: Literal["auto", "never", "must"] = "auto",
    device: str = "auto",
    dry_run: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Pre-train an encoder, as `discern pretrain` does. An interrupted run in `out` is continued exactly where it stopped.

    Args:
        config: TOML file of settings, over the preset; or the folder of a run.
        data: data set, as `prepare` makes it.
        out: folder of the run.
        preset: name of the recipe to start from; `discern config presets` lists them.
        settings: single settings, over preset and file: `{"train.max_steps": 1000}`.
        init_from: model whose weights the run begins with; it needs no preset.
        resume: 'auto' continues a run that is there, 'never' starts over (the old run is moved aside), 'must' only continues.
        device: 'auto', 'cpu', 'cuda', 'cuda:1', ...
        dry_run: train nothing, and return `parameters`, `flops`, `memory_bytes` and other estimates.

    Returns:
        The last record of the run's metrics: `step`, `loss`, `heldout_loss` and others; losses are means in nats. Empty on
        the ranks of a distributed run that don't write.

    Raises:
        ConfigError, DataError: something doesn't fit; nothing has been written.
        CheckpointError, NumericsError: the run had to stop; its last good checkpoint is in place.
        KeyboardInterrupt: Ctrl-C was pressed; the run is saved, and the same call continues it.
    """
    listener = progress or Logged()
    request = pretraining.PretrainRequest(
        Path(data), Path(out), _path(config), preset, overrides_of(settings), resume, device, _model(init_from, listener)
    )
    if dry_run:
        return plan(request).values
    return pretraining.pretrain(request, listener) or {}


def adapt(
    model: PathLike,
    *,
    data: PathLike,
    out: PathLike,
    replay: PathLike | None = None,
    replay_share: float = 0.2,
    add_tokens: int | PathLike | None = None,
    config: PathLike | None = None,
    settings: Settings | None = None,
    resume: Literal["auto", "never", "must"] = "auto",
    sequences: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Continue the pre-training of a model on your own text, as `discern adapt` does.

    Args:
        model: a run, an export, or a Hugging Face ELECTRA or BERT.
        data: data set of your text, made with the model's tokenizer.
        out: folder of the new run.
        replay: data set of general text, to mix in and to measure what is forgotten.
        replay_share: share of the examples that are of the general text; 0: only measure on it.
        add_tokens: extend the vocabulary by this many words of your text, or by those of a file, one a line.
        sequences: held-out rows to measure on; 0: all.

    Returns:
        `step`, and the held-out figures `before` and `after`, by text.

    Raises:
        ConfigError, DataError: something doesn't fit; nothing has been trained.
        CheckpointError, NumericsError: the run had to stop; its last good checkpoint is in place.
    """
    listener = progress or Logged()
    added = None if add_tokens is None else AddedTokens.of(str(add_tokens))
    mixed = None if replay is None else Replay(Path(replay), replay_share)
    folder = local_model(model, listener.note)
    request = adapting.AdaptRequest(
        folder, Path(data), Path(out), _path(config), overrides_of(settings), mixed, added, resume, device, sequences
    )
    return adapting.adapt(request, listener) or {}


def evaluate(
    model: PathLike,
    *,
    data: PathLike | None = None,
    sequences: int = 0,
    batch_size: int = 32,
    task: str | None = None,
    seed: int | None = None,
    device: str = "auto",
    precision: str = "float32",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure a pre-trained model on held-out text, or a fine-tuned one on a labelled file, as `discern evaluate` does.

    Args:
        model: a run, an export with all its networks, a fine-tuning, or an export of that.
        data: data set whose held-out part is used (default: that of the run); for a fine-tuning, a labelled file.
        sequences: held-out rows to measure on; 0: all.
        task: task of a fine-tuning with several tasks.
        seed: seed of a fine-tuning whose weights are used; None: the best.

    Returns:
        The figures by name; for a fine-tuning `metric`, `score`, `metrics`, `loss`.

    Raises:
        ConfigError, DataError: the model or the data does not fit.
        CheckpointError: weights are missing or damaged.
    """
    listener = progress or Logged()
    folder = local_model(model, listener.note)
    if holds_task(folder):
        return judge(JudgeRequest(folder, _path(data), task, seed, device, precision), listener)
    if task is not None or seed is not None:
        raise ConfigError(f"task and seed are for fine-tuned models, and {model} is not one", hint="leave them out")
    request = held_out.EvaluateRequest(folder, _path(data), sequences, batch_size, device, precision)
    return held_out.evaluate(request, listener, listener.note)


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
    debug: bool = False,
    device: str = "auto",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Fine-tune an encoder on named tasks or on a labelled file, as `discern finetune` does.

    Args:
        model: a run, an export, a Hugging Face folder, or the name of a preset.
        out: folder of the results; interrupted work there is continued.
        task: name of a task, or several that are trained at once.
        data: folder of the task's files, one for each task.
        train: a labelled file of your own to train on, instead of a task.
        dev: the file to evaluate on; None: a part of `train` is held out.
        text, pair, label: columns of your own files for classification and regression; columns that are not given are
            recognized by their names.
        words, tags: columns for tagging; in a file with one word a line their numbers, from 0.
        question, context, answer: columns for answers to questions.
        settings: single settings, over the recipe: `{"finetune.epochs": 5}`.
        recipe: 'auto' fits the length of training to the data, and finds answers with a head that transformers has;
            'paper' and 'google' (the released code) use their own lengths and the joint head for answers.
        seeds: how many times to train; the results have median and spread.
        sweep_rates: choose the learning rate by short trainings first.
        baselines: also evaluate simple predictors (TF-IDF, a perceptron, ...) on the same examples.
        debug: use only a hundred examples of each file.

    Returns:
        What results.json holds: `task`, `metric`, `median`, `scores`, `metrics`, `failed_seeds`, `baselines` and others.

    Raises:
        ConfigError, DataError: something doesn't fit; nothing has been written.
        CheckpointError: the disk is full, or a checkpoint is damaged.
        KeyboardInterrupt: Ctrl-C was pressed; the work is saved, and the same call continues it.
    """
    names = [task] if isinstance(task, str) else list(task)
    folders = [Path(each) for each in ([data] if isinstance(data, str | Path) else data)]
    if len(folders) == 1:
        folders *= len(names)
    if len(names) != len(folders):
        raise ConfigError(f"{len(names)} tasks and {len(folders)} folders of data", hint="give a folder for each task")
    own = {"train": train, "dev": dev, "text": text, "pair": pair, "label": label, "words": words, "tags": tags}
    own |= {"question": question, "context": context, "answer": answer}
    files = {f"files.{name}": str(value) for name, value in own.items() if value is not None}
    if names and files:
        raise ConfigError("a named task brings its own files and columns", hint="leave out task, or train, dev and the columns")
    request = finetuning.FinetuneRequest(
        model=str(model),
        out=Path(out),
        tasks=list(zip(names, folders, strict=True)),
        config=_path(config),
        overrides=(*overrides_of(files), *(("finetune.rate_search=true",) if sweep_rates else ()), *overrides_of(settings)),
        recipe=recipe,
        seeds=seeds,
        untrained=untrained,
        tokenizer=_path(tokenizer),
        debug=debug,
        baselines=baselines,
        device=device,
    )
    return finetuning.finetune(request, progress or Logged())


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
    precision: str = "float32",
    progress: Progress | None = None,
) -> list[Prediction]:
    """Predict for every row of a file: the lines of `discern predict`. For texts in memory, use
    `discern.load(model).predict(texts)`.

    Args:
        model: a fine-tuning, its export, or a Hugging Face model for such a task.
        input: a table, a text with one row a line, or a file in the task's own format.
        text, pair, words, question, context: columns of a table; those not given are called as in the training file.

    Raises:
        ConfigError, DataError: the model or the file does not fit.
        CheckpointError: the weights are missing or damaged.
    """
    named = {"text": text, "pair": pair, "words": words, "question": question, "context": context}
    columns = {role: str(column) for role, column in named.items() if column is not None}
    listener = progress or Logged()
    folder = local_model(model, listener.note)
    request = prediction.PredictRequest(folder, Path(input), None, task, seed, columns, format, logits, device, precision)
    found: list[Prediction] = []
    prediction.predict(request, found.extend, listener)
    return found


def export(
    model: PathLike,
    *,
    out: PathLike,
    network: str | None = None,
    all_networks: bool = False,
    task: str | None = None,
    seed: int | None = None,
    precision: Literal["float32", "bfloat16", "float16"] = "float32",
    progress: Progress | None = None,
) -> Path:
    """Write a network of a run, or a fine-tuned model, as a folder that transformers loads, as `discern export` does.

    Args:
        model: a run, an export, or a fine-tuning.
        out: new or empty folder, or an earlier export, which is replaced.
        network: network of a run; None: the one to fine-tune.
        all_networks: also write the other networks of a run, in folders of their names.
        task: task of a fine-tuning with several tasks.
        seed: seed of a fine-tuning whose weights are used; None: the best.
        precision: type that the weights are stored in.

    Returns:
        The folder.

    Raises:
        ConfigError, DataError: the model has no such network or task, or `out` holds something else.
        CheckpointError, NumericsError: the weights are missing, damaged, or not finite.
    """
    folder, listener = Path(model), progress or Logged()
    if is_finetuned(folder):
        if network is not None or all_networks:
            raise ConfigError("network and all_networks are for runs; a fine-tuned model has one", hint="leave them out")
        return export_task(TaskExportRequest(folder, Path(out), task, seed, precision), listener).folder
    if task is not None or seed is not None:
        raise ConfigError(f"task and seed are for fine-tuned models, and {model} is not one", hint="leave them out")
    request = of_run.ExportRequest(folder, Path(out), network, all_networks, precision)
    if is_export(folder):
        return export_again(request, listener).folder
    return of_run.export(request, listener, listener.note).folder


def overrides_of(settings: Settings | None) -> tuple[str, ...]:
    """Settings as `--set` takes them, a text each: values as TOML has them.

    Raises:
        ConfigError: a value has no form in TOML.
    """
    found: list[str] = []
    for key, value in (settings or {}).items():
        if isinstance(value, Mapping):
            found += [f"{key}.{override}" for override in overrides_of(value)]
            continue
        plain = str(value) if isinstance(value, Path) else value
        try:
            found.append(f"{key}={tomli_w.dumps({'value': plain}).partition('=')[2].strip()}")
        except TypeError:
            raise ConfigError(
                f"{key} is a {type(value).__name__}, expected a text, a number, True, False or a list of these",
                hint="leave it out for its default",
            ) from None
    return tuple(found)


def _path(path: PathLike | None) -> Path | None:
    return None if path is None else Path(path)


def _model(path: PathLike | None, listener: Progress) -> Path | None:
    """The folder of a model, which may be given by its name on the Hugging Face Hub."""
    return None if path is None else local_model(path, listener.note)
