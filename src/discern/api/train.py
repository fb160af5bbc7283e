"""The verbs that train: from text to a data set, a pre-trained encoder and a fine-tuned model.

Results are the values that `--json` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from discern.api.verb import (
    FOREIGN,
    ConfigFile,
    Device,
    Listener,
    Names,
    PathLike,
    Paths,
    Preset,
    Settings,
    advanced,
    argument,
    listed,
    listening,
    model_folder,
    option,
    overrides_of,
    path_of,
    refuse_together,
    verb,
)
from discern.config.schema import toml_value
from discern.errors import ConfigError
from discern.storage.files import check_apart

DataSets = PathLike | Sequence[PathLike] | Mapping[Path | str, float] | Mapping[str, float]
DataTemperature = Annotated[
    float | None,
    advanced(
        "Without weights, a data set of n tokens has the share p ~ n^(1/T). 1 (default) is by size; larger values favor small "
        "data sets, such as languages with little text (mT5, XLM-R: 3.3).",
        "T",
        min=0.1,
    ),
]
Resume = Annotated[
    Literal["auto", "never", "must"],
    option(
        "What to do if --out holds a run. auto: continue it; never: move it aside and start over; must: continue it, and fail if "
        "there is none."
    ),
]


@verb("Train", trains=True)
def demo(
    out: Annotated[PathLike, option("Folder for the text, the data set, the run and the report.", "DIR")] = "demo",
    *,
    minutes: Annotated[float, option("Maximum training time in minutes.", "N", min=0.05)] = 3.0,
    settings: Settings = None,
    progress: Listener = None,
) -> dict[str, Any]:
    """Train a small network on text from this machine, and show what it has learned.

    The text is the documentation of the installed Python packages. The demo takes at most five minutes on two cores. If you
    interrupt it with Ctrl-C, run the same command again to continue.

    Example: discern demo --out demo

    Returns:
        The metrics of the network, scores on a labeled task, and the path of the report.
    """
    from discern.demo.run import demo as run

    listener, _ = listening(progress)
    return run(Path(out), minutes, overrides_of(settings), listener)


@verb("Train")
def prepare(
    inputs: Annotated[
        Paths,
        argument(
            "INPUT",
            "Files, folders, patterns, addresses (https://, s3://, gs://, hf://), '-' for standard input, or "
            "hf:NAME[:CONFIGURATION[:SPLIT]]. Formats: text, CSV, TSV, JSON lines or arrays, parquet, HTML, WARC, "
            "WikiExtractor's <doc>, token ids (.npy, .bin, input_ids), and tar or zip archives of them, nested or not; each "
            "plain or compressed by gz, xz, zst or bz2. The format is detected from the content.",
        ),
    ],
    *,
    out: Annotated[PathLike | None, option("Folder or s3://, gs:// or hf:// address of the new data set.", "DATA")] = None,
    tokenizer: Annotated[
        PathLike | None,
        option(
            "Tokenizer to use: a tokenizer.json, a vocab.txt, a SentencePiece model, a model folder, or the name of a model on "
            "the Hub.",
            "PATH",
        ),
    ] = None,
    train_tokenizer: Annotated[
        Literal["wordpiece", "bpe", "unigram"] | None, option("Kind of tokenizer to train on the input instead.")
    ] = None,
    vocab_size: Annotated[int | None, option("Number of entries of a trained tokenizer (default: 30522).", "N", min=1)] = None,
    lowercase: Annotated[
        bool | None,
        option(
            "Lower-case the text, or keep its case. Default: as the tokenizer specifies; for a bare vocab.txt, inferred from its "
            "entries; for a trained tokenizer, wordpiece lower-cases and the others do not.",
            None,
            "--lowercase/--cased",
        ),
    ] = None,
    text_field: Annotated[
        Names | None,
        option(
            "Field or column that holds the text; PATTERN:NAME for the inputs that match a pattern, such as "
            "'reviews.csv:review'. May be repeated. Default: found by its name, or as the only one with text.",
            "NAME",
        ),
    ] = None,
    documents: Annotated[
        Literal["auto", "blank-line", "file", "line", "record"],
        option("What ends a document. auto: the end of a <doc> or record, otherwise a blank line."),
    ] = "auto",
    language: Annotated[
        str | None,
        option(
            "Language code of the text (en, de, zh, ...), for model cards. Without --tokenizer, a tokenizer that suits the "
            "language is trained.",
            "CODE",
        ),
    ] = None,
    check: Annotated[bool, option("Check the input for problems without writing anything.")] = False,
    overwrite: Annotated[bool, advanced("Replace an existing data set in DATA.")] = False,
    license: Annotated[str | None, advanced("License of the text, such as 'CC BY-SA 3.0', for model cards.", "TEXT")] = None,
    keep_accents: Annotated[
        bool,
        advanced("With --lowercase and a WordPiece: keep accents, which BERT removes; they distinguish words (möchte, mochte)."),
    ] = False,
    exclude: Annotated[
        Names | None,
        advanced("Leave out files of folders and archives that match a pattern, such as '*.js'. May be repeated.", "PATTERN"),
    ] = None,
    encoding: Annotated[
        str | None,
        advanced("Encoding of the text, such as latin-1. Default: UTF-8, or detected in each file that is not.", "NAME"),
    ] = None,
    filter: Annotated[
        Names | None,
        advanced(
            "Keep only documents that pass a filter: words:20 (at least 20 words) or words:20-5000, language:de or "
            "language:de+en, gopher-quality, gopher-repetition or c4. May be repeated; reports how many documents each reason "
            "left out.",
            "NAME",
        ),
    ] = None,
    near_duplicates: Annotated[
        float | None,
        advanced(
            "Remove documents that share at least this fraction of their five-word sequences, such as 0.8, with an earlier "
            "document; found by MinHash.",
            "SIMILARITY",
            min=0.5,  # below, so many documents become candidates that every pair of a large corpus would be compared
            max=1.0,
        ),
    ] = None,
    against: Annotated[
        Paths | None,
        advanced(
            "Evaluation file to look for in the text: plain text with one example per line, CSV, TSV or JSON lines. Reports the "
            "examples that share 13 words in a row with the text, and records them for model cards. May be repeated.",
            "FILE",
        ),
    ] = None,
    against_field: Annotated[
        Names | None,
        advanced("Field or column of the evaluation files to read. Default: all of them. May be repeated.", "NAME"),
    ] = None,
    segmenter: Annotated[
        Literal["none", "jieba", "fugashi", "kiwipiepy", "pythainlp"] | None,
        advanced(
            "Word segmenter for whole-word masking: jieba for Chinese, fugashi for Japanese, kiwipiepy for Korean, pythainlp for "
            "Thai; token ids do not depend on it. Default: that of --language, if it is installed."
        ),
    ] = None,
    heldout: Annotated[float, advanced("Fraction of documents to hold out.", "FRACTION", min=0, max=0.99)] = 0.01,
    seed: Annotated[int, advanced("Random seed for choosing the held-out documents.", "N")] = 0,
    workers: Annotated[
        int | None,
        advanced("Number of processes that tokenize (default: number of cores); the result does not depend on it.", "N", min=1),
    ] = None,
    engine: Annotated[
        Literal["local", "ray"],
        advanced(
            "Where the work runs: in processes on this machine, or on a Ray cluster (the one at RAY_ADDRESS, or one started on "
            "this machine). The result is the same, byte for byte. For ray, INPUT and DATA must be on storage that all machines "
            "share."
        ),
    ] = "local",
    progress: Listener = None,
) -> dict[str, Any]:
    """Make a tokenized data set from text. If interrupted, it leaves no incomplete data set.

    Example: discern prepare wiki/ --out DATA --train-tokenizer wordpiece --vocab-size 8000

    Example: discern prepare reviews.csv --text-field review --out DATA --language zh

    Example: discern prepare wiki/ --check --against glue/RTE/dev.tsv

    Example: discern prepare wiki/ --out DATA --tokenizer vocab.txt --engine ray

    Returns:
        Counts of the data set: `documents`, `tokens`, `vocab_size`, `unknown_fraction` and others; with `check`, what was found.

    Raises:
        ConfigError: the arguments contradict each other, or a value is out of range.
        DataError: the input cannot be read, or `out` holds something else.
    """
    from discern.data import prepare as preparing
    from discern.data.curation.contamination import EvaluationFiles
    from discern.data.executors import available_cores
    from discern.data.job import PrepareOptions
    from discern.data.sources.documents import CorpusOptions
    from discern.data.tokenizer.choice import TokenizerChoice

    listener, warn = listening(progress)
    texts, files = [str(each) for each in listed(inputs)], [Path(each) for each in listed(against)]
    if out is not None:
        check_apart(Path(out), *map(Path, texts), *files)
    if against_field and not files:
        raise ConfigError("--against-field names fields of evaluation files, but none is given", hint="add --against FILE")
    folder = None if tokenizer is None else model_folder(tokenizer, listener)
    given = TokenizerChoice(folder, train_tokenizer, vocab_size, lowercase, keep_accents)
    choice, chosen, code = preparing.in_language(language, given, segmenter, warn)
    shared: dict[str, Any] = {
        "tokenizer": choice,
        "corpus": CorpusOptions(
            documents, text_fields=tuple(listed(text_field)), exclude=tuple(listed(exclude)), encoding=encoding
        ),
        "options": PrepareOptions(
            chosen,
            heldout,
            seed,
            workers=available_cores() if workers is None else workers,
            near_duplicates=near_duplicates,
            filters=tuple(listed(filter)),
            language=code,
            license=license,
        ),
        "against": EvaluationFiles(files, listed(against_field)) if files else None,
        "progress": listener,
    }
    if check:
        from discern.data.check import check as check_input

        refuse_together("--check", {"--engine ray": engine != "local"})
        return check_input(texts, exclude=path_of(out), **shared).values()
    if out is None:
        choice.check()
        raise ConfigError("no output folder is given", hint="add --out DATA, or --check to look at the input only")
    report = preparing.prepare(texts, out=Path(out), overwrite=overwrite, engine=engine, **shared)
    for line in (*map(str, report.manifest.problems), *preparing.warnings_of(report.manifest)):
        warn(line)
    if report.repaired:
        warn(f"damaged or missing files were written again: {', '.join(report.repaired)}")
    return report.values()


@verb("Train", nproc=True)
def pretrain(
    config: ConfigFile = None,
    *,
    data: Annotated[
        DataSets,
        option(
            "Data set made by `discern prepare`. May be repeated, to mix data sets of one tokenizer; a weight is a share of the "
            "tokens to train on. Default: by the sizes of the data sets.",
            "DATA[=WEIGHT]",
        ),
    ],
    out: Annotated[PathLike, option("Folder of the run. An interrupted run in it is continued.", "RUN")],
    preset: Preset = None,
    settings: Settings = None,
    init_from: Annotated[
        PathLike | None,
        option(f"Start from the weights of a run, an export, or {FOREIGN}; no preset is needed then.", "MODEL"),
    ] = None,
    teacher: Annotated[
        PathLike | None,
        option(
            "With objective mlm or hybrid: also learn how this larger model with the same tokenizer predicts the masked words; a "
            f"run, an export, or {FOREIGN}.",
            "MODEL",
        ),
    ] = None,
    resume: Resume = "auto",
    dry_run: Annotated[bool, option("Show the estimated cost and what differs from the preset; train nothing.")] = False,
    data_temperature: DataTemperature = None,
    decay_from: Annotated[
        PathLike | None,
        advanced(
            "Continue a run with schedule 'wsd' or 'constant' in the new folder --out, and decay its learning rate to zero over "
            "optimizer.decay_steps steps. RUN means its newest checkpoint; RUN/checkpoints/step-... selects another one.",
            "RUN",
        ),
    ] = None,
    push_checkpoints: Annotated[
        str | None,
        advanced(
            "Push checkpoints to this repository of the Hugging Face Hub while training, each as revision step-N, and the last "
            "one also as main (see 'discern export --push'). A checkpoint is skipped if the one before is still being pushed.",
            "USER/NAME",
        ),
    ] = None,
    device: Device = "auto",
    check_only: bool = False,
    processes: int = 1,
    progress: Listener = None,
) -> dict[str, Any]:
    """Pre-train an encoder. You can interrupt it with Ctrl-C at any time; run the same command again to continue exactly where it
    stopped.

    Example: discern pretrain --preset electra-small --data DATA --out RUN --set train.max_hours=10

    Example: discern pretrain --preset electra-small --data DATA=0.7 --data GENERAL=0.3 --out RUN

    Example: discern pretrain --init-from MODEL --data DATA --out RUN --set train.max_steps=20000

    Example: discern pretrain --preset modern-cpu --set objective.name=mlm --teacher MODEL --data DATA --out RUN

    Example: discern pretrain --decay-from RUN --data DATA --out DECAYED --set optimizer.decay_steps=2000

    Returns:
        The last record of the run's metrics: `step`, `loss`, `heldout_loss` and others; losses are means in nats. On ranks of a
        distributed run that don't write metrics, an empty dictionary.

    Raises:
        ConfigError, DataError: the arguments, settings or data are invalid; nothing has been written.
        CheckpointError, NumericsError: training had to stop; the last good checkpoint is kept.
        KeyboardInterrupt: Ctrl-C was pressed; the run is saved, and the same call resumes it.
    """
    from discern.pretraining import run as pretraining

    listener, _ = listening(progress)
    options: dict[str, Any] = {
        "config": path_of(config),
        "data": _sources(data),
        "out": Path(out),
        "preset": preset,
        "overrides": (
            *_temperature(data_temperature),
            *(() if teacher is None else (f"objective.teacher={toml_value(str(model_folder(teacher, listener).resolve()))}",)),
            *overrides_of(settings),
        ),
        "resume": resume,
        "init_from": None if init_from is None else model_folder(init_from, listener),
        "decay_from": path_of(decay_from),
    }
    if dry_run or check_only:
        from discern.pretraining.estimate import estimate

        planned = pretraining.plan(**options, warn=lambda _: None)
        if check_only:
            return {}
        estimated = estimate(planned, device=device, processes=processes)
        return {**estimated.values, "summary": estimated.text}
    if push_checkpoints is None:
        return pretraining.pretrain(**options, device=device, progress=listener) or {}
    from discern.model_files.hub import pushed_checkpoints

    with pushed_checkpoints(Path(out), push_checkpoints, listener.note):
        return pretraining.pretrain(**options, device=device, progress=listener) or {}


@verb("Train", nproc=True)
def adapt(
    model: Annotated[PathLike, argument("MODEL", f"A run, an export, or {FOREIGN}.")],
    *,
    data: Annotated[
        DataSets,
        option(
            "Data set of your text, made by 'discern prepare TEXT --out DATA --tokenizer MODEL'. Without --replay, it may be "
            "repeated, as for 'discern pretrain'.",
            "DATA[=WEIGHT]",
        ),
    ],
    out: Annotated[PathLike, option("Folder of the new run. An interrupted run in it is continued.", "OUT")],
    replay: Annotated[
        PathLike | None, option("Data set of general text, to mix into the training and to measure forgetting.", "DATA")
    ] = None,
    replay_share: Annotated[
        float | None,
        option(
            "Share of the general text in the tokens to train on (default: 0.2); 0: only evaluate on it.",
            "FRACTION",
            min=0.0,
            max=0.99,
        ),
    ] = None,
    add_tokens: Annotated[
        str | int | Path | None,
        option(
            "Add to the vocabulary the N words of your text that save the most tokens, or the words in FILE, one per line.",
            "N|FILE",
        ),
    ] = None,
    settings: Settings = None,
    resume: Resume = "auto",
    config: Annotated[PathLike | None, advanced("Settings that override those of the model.", "CONFIG.toml")] = None,
    data_temperature: DataTemperature = None,
    sequences: Annotated[int, advanced("Number of held-out rows to evaluate on; 0: all.", "N", min=0)] = 0,
    device: Device = "auto",
    check_only: bool = False,
    progress: Listener = None,
) -> dict[str, Any]:
    """Continue the pre-training of a model on your own text, and print the metrics before and after.

    Example: discern adapt google/electra-small-discriminator --data DATA --out OUT --set train.max_steps=2000

    Example: discern adapt RUN --data DATA --out OUT --replay GENERAL --replay-share 0.2 --add-tokens 500

    Returns:
        `step`, and the held-out metrics `before` and `after`, for each data set by its name. On ranks of a distributed run that
        don't write metrics, an empty dictionary.

    Raises:
        ConfigError, DataError: the arguments, settings or data are invalid; nothing has been trained.
        CheckpointError, NumericsError: training had to stop; the last good checkpoint is kept.
    """
    from discern.pretraining import adapt as adapting
    from discern.pretraining.warm_start import AddedTokens

    listener, _ = listening(progress)
    sources = _sources(data)
    check_apart(Path(out), *map(Path, sources), Path(model), path_of(replay))
    folder = model_folder(model, listener)
    added = None if add_tokens is None else AddedTokens.of(str(add_tokens))
    options: dict[str, Any] = {
        "data": sources,
        "out": Path(out),
        "config": path_of(config),
        "overrides": (*_temperature(data_temperature), *overrides_of(settings)),
        "replay": path_of(replay),
        "replay_share": replay_share,
        "resume": resume,
        "progress": listener,
    }
    if check_only:
        if added is not None:  # one process makes the data set
            adapting.data_with_tokens(folder, added=added, **options)
        return {}
    return adapting.adapt(folder, **options, added=added, device=device, sequences=sequences) or {}


def _sources(data: Any) -> Any:
    """Data sets to train on, as locations or as a mapping to weights; "DATA=0.7" gives a location with its weight."""
    from discern.data.batching.mixture import parse_sources

    return data if isinstance(data, Mapping) else parse_sources([*map(str, listed(data))])


def _temperature(value: float | None) -> tuple[str, ...]:
    return () if value is None else (f"data.mixture_temperature={value}",)


def _column(what: str) -> Any:
    return advanced(what, "COLUMN")


@verb("Train", nproc=True)
def finetune(
    model: Annotated[
        PathLike,
        argument("MODEL", f"A run, an export, a fine-tuned model (its encoder is trained further), {FOREIGN}, or a preset."),
    ],
    *,
    out: Annotated[PathLike, option("Output folder; interrupted work in it is continued.", "OUT")],
    train: Annotated[
        PathLike | None, option("File to train on: CSV, TSV, JSON lines, Parquet, or CoNLL columns (.conll).", "FILE")
    ] = None,
    dev: Annotated[
        PathLike | None,
        option(
            "File to evaluate on (default: a tenth of the rows is held out); for pairs also a folder of queries and documents, "
            "or a file in its qrels.",
            "FILE",
        ),
    ] = None,
    text: Annotated[str | None, option("Column of the text (default: recognized by its name).", "COLUMN")] = None,
    pair: Annotated[str | None, option("Column of a second text.", "COLUMN")] = None,
    label: Annotated[str | None, option("Column of the class, the number, or the list of classes.", "COLUMN")] = None,
    task: Annotated[
        Names | None,
        option(
            "Name of a task. May be repeated; the tasks are then trained together. 'pairs' trains text embeddings.",
            "NAME",
        ),
    ] = None,
    data: Annotated[Paths | None, option("Folder of the task's files, one for each task.", "DIR")] = None,
    for_: Annotated[
        Literal["cross-encoder"] | None,
        advanced("Train a head that transformers supports, to score pairs of texts with sentence-transformers.", None, "--for"),
    ] = None,
    teacher: Annotated[
        PathLike | None,
        option(
            "Also learn the outputs of a larger fine-tuned model: of 'discern finetune', or any sequence classifier that "
            "transformers loads (folder or name on the Hub).",
            "MODEL",
        ),
    ] = None,
    unlabeled: Annotated[
        PathLike | None, advanced("More texts for the teacher to label: a table, or one text per line.", "FILE")
    ] = None,
    seeds: Annotated[int, option("Number of random seeds to train with; reports median and spread.", "N", min=1)] = 1,
    settings: Settings = None,
    label_separator: Annotated[str | None, advanced("Mark between several labels in one cell, such as ';'.", "MARK")] = None,
    words: Annotated[str | int | None, _column("Column of the words to tag; for CoNLL columns its index, from 0.")] = None,
    tags: Annotated[str | int | None, _column("Column of the tags, or its index; -1 is the last column.")] = None,
    question: Annotated[str | None, _column("Column of the question.")] = None,
    context: Annotated[str | None, _column("Column of the text that contains the answer.")] = None,
    answer: Annotated[str | None, _column("Column of the answer.")] = None,
    config: Annotated[PathLike | None, advanced("Settings that override the recipe.", "TOML")] = None,
    recipe: Annotated[
        Literal["auto", "paper", "google"],
        advanced(
            "auto: fit the length to the data, and extract answers with a head that transformers has. paper: settings of the "
            "ELECTRA paper. google: settings of the released code."
        ),
    ] = "auto",
    tokenizer: Annotated[PathLike | None, advanced("Tokenizer to use if MODEL is a preset.", "PATH")] = None,
    untrained: Annotated[bool, advanced("Start from random weights instead of the model's, for comparison.")] = False,
    sweep: Annotated[
        Names | None,
        advanced("Train once with each value. May be repeated; trains all combinations.", "KEY=VALUE,VALUE"),
    ] = None,
    sweep_rates: Annotated[bool, advanced("First choose the learning rate by short training runs.")] = False,
    submission: Annotated[PathLike | None, advanced("Folder to write the zip file to that the GLUE site accepts.", "DIR")] = None,
    baselines: Annotated[bool, advanced("Also evaluate simple baselines (TF-IDF, perceptron, ...).")] = True,
    overwrite: Annotated[bool, advanced("Replace another fine-tuning in OUT.")] = False,
    debug: Annotated[bool, advanced("Use only a hundred examples of each file, for a quick trial.")] = False,
    device: Device = "auto",
    progress: Listener = None,
) -> dict[str, Any]:
    """Fine-tune an encoder on a task or on a labeled file of your own.

    Example: discern finetune MODEL --train reviews.csv --text review --label stars --out OUT

    Example: discern finetune MODEL --task sst2 --data glue/SST-2 --out OUT --seeds 3

    Example: discern finetune MODEL --task pairs --train pairs.csv --dev judged.csv --out OUT

    Example: discern finetune MODEL --train reviews.csv --text review --label stars --teacher LARGE --out OUT

    Returns:
        The content of results.json: `task`, `metric`, `median`, `scores`, `metrics`, `failed_seeds`, `baselines` and others.

    Raises:
        ConfigError, DataError: the arguments, settings or data are invalid; nothing has been written.
        CheckpointError: the disk is full, or a checkpoint is damaged.
        KeyboardInterrupt: Ctrl-C was pressed; the work is saved, and the same call resumes it.
    """
    from discern.finetuning.run import finetune as run
    from discern.finetuning.settings import requested_tasks

    listener, _ = listening(progress)
    folders = [Path(each) for each in listed(data)]
    reads = (Path(model), path_of(train), path_of(dev), path_of(teacher), path_of(unlabeled), *folders)
    for option_, folder in (("--out", path_of(out)), ("--submission", path_of(submission))):
        if folder is not None:
            check_apart(folder, *reads, option=option_)
    files: dict[str, object] = {"train": train, "dev": dev, "text": text, "pair": pair, "label": label}
    files |= {"label_separator": label_separator, "words": words, "tags": tags}
    files |= {"question": question, "context": context, "answer": answer}
    tasks, own = requested_tasks(listed(task), folders, files)
    from_model = None if teacher is None else model_folder(teacher, listener).resolve()
    given = {"purpose": for_, "teacher": from_model, "unlabeled": unlabeled}
    return run(
        str(model),
        out=Path(out),
        tasks=tasks,
        config=path_of(config),
        overrides=(
            *own,
            *(("finetune.rate_search=true",) if sweep_rates else ()),
            *(f"finetune.{name}={toml_value(str(value))}" for name, value in given.items() if value is not None),
            *overrides_of(settings),
        ),
        recipe=recipe,
        seeds=seeds,
        untrained=untrained,
        tokenizer=path_of(tokenizer),
        sweep=listed(sweep),
        submission=path_of(submission),
        baselines=baselines,
        overwrite=overwrite,
        debug=debug,
        device=device,
        progress=listener,
    )
