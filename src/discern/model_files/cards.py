"""Model cards: README.md of an export or an import, from Jinja templates. A fact that is not known is shown as "not recorded".

Whatever a template prints is escaped to plain text, as labels, names and remarks are untrusted; only `Markup`, which the filters
`code`, `cell` and `quoted` return, is printed unchanged.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from tokenizers import Tokenizer

from discern import __version__
from discern.config.schema import flatten
from discern.data.tokenizer import load_tokenizer, lowercases
from discern.model_files.finetuned import RESULTS_FILE, SCORES_FILE, read_results, read_scores, seed_folder
from discern.model_files.folder import TEXT_LICENSE, TaskModel
from discern.model_files.huggingface import HuggingFaceModel, read_mark, weights_outside_networks
from discern.model_files.run import RunFolder
from discern.objectives import TITLES
from discern.tasks import known_definition
from discern.tasks.base import Task
from discern.training.metrics_log import held_out_metrics, read_metrics
from discern.training.pretrain_config import PretrainConfig

# Line breaks, control characters, and characters that reorder text: browsers and terminals display cards.
_LAYOUT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_INVISIBLE = re.compile("[\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MARKUP = re.compile(r"([\\`*\[\]{}~]|(?<!\w)_|_(?!\w))")

_SIZES = {
    "num_layers": "Layers",
    "hidden_size": "Hidden size",
    "embedding_size": "Embedding size",
    "num_heads": "Attention heads",
    "feedforward_size": "Feed-forward size",
}
# The settings of fine-tuning that the card shows: those that determine the weights. The scores state the actual length.
_RECIPE = ("finetune.", "task.", "optimizer.")
_LENGTH = {"finetune.epochs", "finetune.min_steps"}
_TRAINING = {"train.max_steps", "train.sequences_per_step", "train.precision"}
# Pipeline tag and class of transformers, by kind of task.
_CLASSES = {
    "classification": ("text-classification", "AutoModelForSequenceClassification"),
    "tagging": ("token-classification", "AutoModelForTokenClassification"),
    "span": ("question-answering", "AutoModelForQuestionAnswering"),
    "vectors": ("sentence-similarity", "AutoModel"),
}


def model_card(run: RunFolder, models: Mapping[str, HuggingFaceModel], title: str) -> str:
    """The card of networks of a run. It contains no paths and no host names.

    Args:
        models: the exported networks by name; the first is at the root.
        title: heading.
    """
    records = [record for record in read_metrics(run.folder) if record.get("step", 0) <= run.step]
    evaluated: dict[str, Any] = next((record for record in reversed(records) if "heldout_loss" in record), {})
    settings, record = flatten(without_paths(run.config)), run.record
    (network, root), *others = models.items()
    facts = _network_facts(models)
    length, positions = settings.get("data.sequence_length"), facts["positions"]
    statistics, objective = record.get("statistics", {}), run.config.objective.name
    unknown, overlap = statistics.get("unknown_fraction"), record.get("overlap")
    own_head = [name for name in root.head if name not in root.factors]
    start = record.get("start")
    versions = {"discern": record.get("discern", "unknown"), **record.get("versions", {})}
    return render(
        "model.md.j2",
        **facts,
        title=title,
        network=network,
        objective=objective,
        objective_title=Markup(TITLES[objective]) if objective in TITLES else objective,
        step=run.step,
        settings=settings,
        tokenizer=tokenizer_kind(load_tokenizer(run.tokenizer_path)),
        other_names=[name for name, _ in others],
        data=statistics,
        is_whole=not weights_outside_networks(run.objective),
        tokens_seen=run.tokens,
        evaluation=held_out_metrics(evaluated),
        evaluated_at=evaluated.get("step"),
        language=language_code(record.get("language")),
        text_license=record.get(TEXT_LICENSE),
        start=None if start is None else PurePath(start["model"]).name,
        mixture=record.get("mixture", {}),
        head_parameters=sum(root.head[name].numel() for name in own_head),
        copy_gate=bool(own_head) and all("copy_gate" in name for name in own_head),
        trained_positions=min(int(length), positions or int(length)) if length else None,
        overlap=None if overlap is None else [("/".join(PurePath(each["file"]).parts[-2:]), each) for each in overlap],
        unknown_tokens=None if unknown is None else f"{unknown:.3%}",
        made_with=_joined(versions),
    )


def imported_card(models: Mapping[str, HuggingFaceModel], *, origin: str, language: str | None = None, **facts: Any) -> str:
    """The card of an import, or of an export that was made from another export.

    Args:
        models: the networks by name; the first is at the root.
        origin: what the model was made from, as Markdown.
        language: of the text that it was trained on.
        facts: `title`: heading; `tokenizer`: kind and casing; `max_length`: tokens per row; `step`: number of updates;
            `settings`: whether the folder holds settings to evaluate the model with; `left_out`: parts of the source that were
            not imported; `remarks`: sentences without a full stop; `source_card`: README.md of the source; `text_license`.
    """
    usual = {"step": None, "settings": False, "left_out": (), "remarks": (), "source_card": "", "text_license": None}
    facts = {**usual, **_network_facts(models), **facts}
    return render("imported.md.j2", origin=Markup(origin), language=language_code(language), **facts)


def task_card(loaded: TaskModel, task: Task[Any], kind: str, model: HuggingFaceModel, labels: Sequence[str], title: str) -> str:
    """The card of a fine-tuned model. It contains no paths and no host names.

    Args:
        kind: kind of the head: 'classification', 'tagging', 'span' or 'vectors'.
        labels: names of the outputs.
        title: heading.
    """
    folder, record = loaded.folder, loaded.record
    seed = seed_folder(folder, loaded.seed)
    results = read_results(folder) if (folder / RESULTS_FILE).is_file() else {}
    scores = read_scores(seed) if (seed / SCORES_FILE).is_file() else {}
    own = results.get("tasks", {}).get(task.name, results if results.get("task") == task.name else {})
    seeds = results.get("seeds", [loaded.seed])
    shown = (
        "split",
        "examples",
        "metrics",
        *(("metric", "mean", "standard_deviation", "worst", "best") if len(seeds) > 1 else ()),
    )
    settings = {
        key: value
        for key, value in results.get("settings", {}).items()
        if (key.startswith((*_RECIPE, f"tasks.{task.name}.")) and key not in _LENGTH) or key in _TRAINING
    }
    definition = known_definition(task.name)
    distinct = list(dict.fromkeys(labels))
    return render(
        "finetuned.md.j2",
        title=title,
        task=task.name if definition else "a custom labeled file",
        published=definition.source if definition else "",
        license=definition.license if definition else "",
        base=re.sub(r"\S*/", "", record["model"]),
        seed=loaded.seed,
        root=model,
        config=model.config,
        hidden_size=model.sizes.hidden_size,
        kind=kind,
        problem=task.labels.kind if kind == "classification" else "single",
        head=getattr(task.config, "head", None),
        own_head=bool(model.head),
        max_length=task.config.sequence_length,
        tokenizer=tokenizer_kind(loaded.tokenizer),
        pairs=(task.labels.pairs or kind == "span") and kind != "vectors",
        pipeline_tag=_CLASSES[kind][0],
        auto_class=_CLASSES[kind][1],
        labels=distinct,
        marks_spans=any(label.startswith(("B-", "I-")) for label in distinct),  # parts of speech don't
        several=len(seeds) > 1,
        seeds=seeds,
        # A missing key is a KeyError: the file is damaged.
        scores={}
        if own.get("median") is None
        else {key: own[key] for key in shown}
        | {"selected_on": own.get("selected_on"), "failed_seeds": own.get("failed_seeds", {})},
        of_seed=(scores.get("tasks", {}).get(task.name) or {}).get(own.get("metric")),
        training=scores,
        train_examples=own.get("train_examples"),
        settings=settings,
        made_with=_joined(({"discern": record["discern"]} if "discern" in record else {}) | record.get("versions", {})),
        language=language_code(record.get("language")),
        text_license=record.get(TEXT_LICENSE),
    )


def _network_facts(models: Mapping[str, HuggingFaceModel]) -> dict[str, Any]:
    """What the cards of pre-trained networks say about the network at the root, and those in folders of their own."""
    root, *_ = models.values()
    architecture, sizes = root.kind.architecture, root.sizes
    keys = architecture.size_keys or _SIZES
    return {
        "version": __version__,
        "root": root,
        "config": root.config,
        "output": root.output,
        "energies": read_mark(root.config).get("gives") == "energy",
        "fills_masks": root.output in ("words", "words or copies"),
        "not_computed": architecture.not_computed(sizes) if root.output in ("words", "words or copies") else "",
        "segments": architecture.has_segments and sizes.num_token_types > 1,
        "query_stream": root.kind.has_query_stream,
        "is_bert": root.config["model_type"] == "bert",
        "sizes": {label: getattr(sizes, name) for name, label in _SIZES.items() if name in keys},
        "position_kind": architecture.positions,
        "positions": sizes.max_positions if architecture.positions == "learned" else None,
        "others": dict(list(models.items())[1:]),
    }


def language_code(language: str | None) -> str:
    """A language code for the front matter, or "" for anything else, which could inject YAML."""
    if language is None or not re.fullmatch(r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8})*", language):
        return ""
    return "'no'" if language == "no" else language  # YAML reads a bare `no`, Norwegian, as false


def tokenizer_kind(tokenizer: Tokenizer) -> str:
    """Kind and casing of a tokenizer, as "WordPiece, lower-cased"."""
    return f"{type(tokenizer.model).__name__}, {'lower-cased' if lowercases(tokenizer) else 'cased'}"


def without_paths(config: PretrainConfig) -> PretrainConfig:
    """The settings of a run as an export tells them: the generator's checkpoint by its name alone."""
    source = config.objective.generator_source
    if source is None:
        return config
    named = config.objective.model_copy(update={"generator_checkpoint": PurePath(source).name})
    return config.model_copy(update={"objective": named})


def _joined(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def render(template: str, **values: Any) -> str:
    """Render a template of this package, for example 'model.md.j2'."""
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> Environment:
    # Jinja would escape everything except `Markup` to HTML; `_markdown` converts all values to `Markup` first.
    environment = Environment(
        loader=PackageLoader("discern.model_files", "templates"),
        autoescape=True,
        finalize=lambda value: Markup(_markdown(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    for make in (code, cell, quoted):
        environment.filters[make.__name__] = functools.partial(lambda make, value: Markup(make(value)), make)
    unknown = "not recorded"
    environment.filters |= {
        "known": lambda value: unknown if value in (None, "") else value,
        "number": lambda value: f"{value:,}" if isinstance(value, int | float) else unknown,
        "setting": lambda value: unknown if value is None else f"{value:g}" if isinstance(value, float) else value,
    }
    return environment


def escaped(value: object) -> str:
    """Text for running Markdown, on one line, that cannot form a link, emphasis or HTML."""
    text = _plain(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\1", text)


def code(value: object) -> str:
    """Text as a code span, even if it contains backticks."""
    text = _plain(value)
    if not text.strip():
        return "(empty)"
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def cell(value: object) -> str:
    """Text, or Markdown if it is `Markup`, for a cell of a table: on one line, with every bar escaped."""
    return _LAYOUT.sub(" ", _markdown(value)).replace("|", "\\|")


def quoted(card: str) -> str:
    """Third-party Markdown as a quotation, without its front matter; HTML in it is shown, not interpreted."""
    body = card.strip()
    if body.startswith("---\n") and (end := body.find("\n---", 3)) > 0:
        body = body[end + 4 :].strip()
    lines = (_INVISIBLE.sub("", _LAYOUT.sub(" ", line.replace("<", "&lt;"))) for line in body.splitlines())
    return "\n".join(f"> {line}".rstrip() for line in lines)


def _plain(value: object) -> str:
    return _INVISIBLE.sub("\ufffd", _LAYOUT.sub(" ", str(value)))


def _markdown(value: object) -> str:
    return str(value) if isinstance(value, Markup) else escaped(value)
