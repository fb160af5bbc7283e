"""Model cards: README.md of an export or an import, from Jinja templates. A card says what is known, and what is not recorded.

Whatever a template prints is escaped to plain text, as labels, names and remarks are untrusted; only `Markup`, which the filters
`code`, `cell` and `quoted` return, is printed unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from tokenizers import Tokenizer

from discern import __version__
from discern.data.languages import LANGUAGES
from discern.data.tables import whole_text
from discern.data.tokenizer import load_tokenizer, lowercases
from discern.errors import counted
from discern.model_files.finetuned import RESULTS_FILE, SCORES_FILE, read_results, read_scores, seed_folder
from discern.model_files.folder import PROVENANCE, Provenance, TaskModel
from discern.model_files.huggingface import HuggingFaceFolder, HuggingFaceModel, read_mark, weights_outside_networks
from discern.model_files.run import RunFolder
from discern.objectives import TITLES
from discern.tasks import known_definition
from discern.tasks.base import Task
from discern.training.config import PretrainConfig
from discern.training.metrics import held_out_metrics, read_metrics

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
_RECIPE = ("finetune.", "task.", "optimizer.", "train.max_steps", "train.sequences_per_step", "train.precision")
# The length is stated with the scores, and the others are paths.
_HIDDEN = {"finetune.epochs", "finetune.min_steps", "finetune.teacher", "finetune.unlabeled"}
# Licenses that the Hub knows by these names: https://huggingface.co/docs/hub/repositories-licenses
_HUB_LICENSES = frozenset(
    "apache-2.0 mit cc0-1.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 "
    "cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 "
    "cdla-sharing-1.0 cdla-permissive-1.0 cdla-permissive-2.0 etalab-2.0 gfdl gpl-3.0 odc-by odbl pddl unlicense".split()
)
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
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
    settings, facts = without_paths(run.config), _network_facts(models)
    network, root = next(iter(models.items()))
    length, positions = settings.data.sequence_length, facts["positions"]
    own_head = [name for name in root.head if name not in root.factors]
    return render(
        "model.md.j2",
        **facts,
        **_front_matter(run.provenance),
        title=title,
        run=run,
        record=run.record,
        network=network,
        objective=settings.objective.name,
        objective_title=Markup(TITLES.get(settings.objective.name, escaped(settings.objective.name))),
        duration=_duration(records[-1]["seconds"]) if records and settings.train.max_hours is not None else None,
        settings=settings,
        tokenizer=tokenizer_kind(load_tokenizer(run.tokenizer_path)),
        is_whole=not weights_outside_networks(run.objective),
        evaluation=held_out_metrics(evaluated),
        evaluated_at=evaluated.get("step"),
        start=PurePath(run.record["start"]["model"]).name if "start" in run.record else None,
        head_parameters=sum(root.head[name].numel() for name in own_head),
        copy_gate=bool(own_head) and all("copy_gate" in name for name in own_head),
        trained_positions=min(length, positions or length),
    )


def imported_card(
    models: Mapping[str, HuggingFaceModel], *, origin: str, provenance: Provenance | None = None, **facts: Any
) -> str:
    """The card of an import, or of an export that was made from another export.

    Args:
        models: the networks by name; the first is at the root.
        origin: what the model was made from, as Markdown.
        provenance: of the model; None: nothing is known.
        facts: `title`: heading; `tokenizer`: kind and casing; `max_length`: tokens per row; `step`: number of updates;
            `settings`: whether the folder holds settings to evaluate the model with; `left_out`: parts of the source that were
            not imported; `remarks`: sentences without a full stop; `source_card`: README.md of the source.
    """
    usual = {"step": None, "settings": False, "left_out": (), "remarks": (), "source_card": ""}
    facts = {**usual, **_network_facts(models), **_front_matter(provenance or {}), **facts}
    return render("imported.md.j2", origin=Markup(origin), **facts)


def exported_again_card(source: HuggingFaceFolder, models: Mapping[str, HuggingFaceModel], title: str) -> str:
    """The card of an export that was made from another export or an import, with the card of that one at its end."""
    mark, first = source.mark, escaped(next(iter(models)))
    if "imported" in mark:
        origin = f"the {first} of an imported model: a {escaped(mark['imported'])}"
    else:
        origin = f"the {first} of a run with objective {code(mark.get('objective'))}, whose card is at the end"
    card = source.folder / "README.md"
    return imported_card(
        models,
        title=title,
        origin=origin,
        tokenizer=tokenizer_kind(source.tokenizer),
        max_length=source.max_length,
        step=source.step,
        provenance=source.provenance,
        source_card=whole_text(card) if card.is_file() else "",
    )


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
    training = read_scores(seed) if (seed / SCORES_FILE).is_file() else {}
    scores = results.get("tasks", {}).get(task.name, results)
    definition, distinct = known_definition(task.name), list(dict.fromkeys(labels))
    return render(
        "finetuned.md.j2",
        **_front_matter(record[PROVENANCE], definition.license if definition else ""),
        title=title,
        task=task,
        definition=definition,
        base=record["model"] if record[PROVENANCE].get("base_models") else re.sub(r"\S*/", "", record["model"]),
        seed=loaded.seed,
        root=model,
        kind=kind,
        tokenizer=tokenizer_kind(loaded.tokenizer),
        pairs=(task.labels.pairs or kind == "span") and kind != "vectors",
        pipeline_tag=_CLASSES[kind][0],
        auto_class=_CLASSES[kind][1],
        labels=distinct,
        marks_spans=any(label.startswith(("B-", "I-")) for label in distinct),  # parts of speech don't
        seeds=results.get("seeds", []),
        scores=scores if scores.get("median") is not None else {},
        of_seed=(training.get("tasks", {}).get(task.name) or {}).get(scores.get("metric")),
        training=training,
        settings={
            key: value
            for key, value in results.get("settings", {}).items()
            if key.startswith((*_RECIPE, f"tasks.{task.name}.")) and key not in _HIDDEN
        },
        record=record,
    )


def _front_matter(provenance: Provenance, *further: str) -> dict[str, Any]:
    """What the front matter says of where a model comes from, as plain words that cannot inject YAML.

    Args:
        further: licenses of the text that the model was fine-tuned on.
    """
    licenses = provenance.get("licenses", ())
    names = [re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") for name in dict.fromkeys((*licenses, *further)) if name]
    names = ["cc0-1.0" if name == "cc0" else name or "other" for name in names]
    languages = provenance.get("languages", ())
    return {
        "license": names[0] if len(names) == 1 and names[0] in _HUB_LICENSES else "other" if names else "",
        "license_name": "-and-".join(names),
        "licenses": licenses,
        "languages": [LANGUAGES.get(code, code) for code in languages],
        # YAML reads a bare `no`, Norwegian, as false.
        "language_codes": ["'no'" if code == "no" else code for code in languages if code in LANGUAGES],
        **{key: [name for name in provenance.get(key, ()) if _HUB_NAME.fullmatch(name)] for key in ("datasets", "base_models")},
    }


def _duration(seconds: float) -> str:
    """A time in words: "45 seconds", "10 minutes", "36 hours"."""
    size, unit = (3600, "hour") if seconds >= 36_000 else (60, "minute") if seconds >= 120 else (1, "second")
    return counted(round(seconds / size), unit)


def _network_facts(models: Mapping[str, HuggingFaceModel]) -> dict[str, Any]:
    """What the cards of pre-trained networks say about the network at the root, and those in folders of their own."""
    root, *_ = models.values()
    architecture, sizes = root.kind.architecture, root.sizes
    keys = architecture.size_keys or _SIZES
    fills_masks = root.output in ("words", "words or copies")
    return {
        "root": root,
        "energies": read_mark(root.config).get("gives") == "energy",
        "fills_masks": fills_masks,
        "not_computed": "the enhanced mask decoder" if fills_masks and getattr(sizes, "mask_decoder", False) else "",
        "segments": architecture.has_segments and sizes.num_token_types > 1,
        "query_stream": root.kind.has_query_stream,
        "sizes": {label: getattr(sizes, name) for name, label in _SIZES.items() if name in keys},
        "position_kind": architecture.positions,
        "positions": sizes.max_positions if architecture.positions == "learned" else None,
        "others": dict(list(models.items())[1:]),
    }


def tokenizer_kind(tokenizer: Tokenizer) -> str:
    """Kind and casing of a tokenizer, as "WordPiece, lower-cased"."""
    return f"{type(tokenizer.model).__name__}, {'lower-cased' if lowercases(tokenizer) else 'cased'}"


def without_paths(config: PretrainConfig) -> PretrainConfig:
    """The settings of a run as an export tells them: other models by their names alone."""
    paths = {name: getattr(config.objective, name, None) for name in ("generator_checkpoint", "teacher")}
    named = {name: PurePath(path).name for name, path in paths.items() if path is not None}
    return config.model_copy(update={"objective": config.objective.model_copy(update=named)})


def render(template: str, **values: Any) -> str:
    """Render a template of this package, for example 'model.md.j2'."""
    return _ENVIRONMENT.get_template(template).render(values)


def escaped(value: object) -> str:
    """Text for running Markdown, on one line, that cannot form a link, emphasis or HTML."""
    text = _plain(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKUP.sub(r"\\\1", text)


def code(value: object) -> Markup:
    """Text as a code span, even if it contains backticks."""
    text = _plain(value)
    if not text.strip():
        return Markup("(empty)")
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return Markup(f"{ticks}{space}{text}{space}{ticks}")


def cell(value: object) -> Markup:
    """Text, or Markdown if it is `Markup`, for a cell of a table: on one line, with every bar escaped."""
    return Markup(_LAYOUT.sub(" ", _markdown(value)).replace("|", "\\|"))


def quoted(card: str) -> Markup:
    """Third-party Markdown as a quotation, without its front matter; HTML in it is shown, not interpreted."""
    body = card.strip()
    if body.startswith("---\n") and (end := body.find("\n---", 3)) > 0:
        body = body[end + 4 :].strip()
    lines = (_INVISIBLE.sub("", _LAYOUT.sub(" ", line.replace("<", "&lt;"))) for line in body.splitlines())
    return Markup("\n".join(f"> {line}".rstrip() for line in lines))


def _plain(value: object) -> str:
    return _INVISIBLE.sub("\ufffd", _LAYOUT.sub(" ", str(value)))


def _markdown(value: object) -> str:
    return str(value) if isinstance(value, Markup) else escaped(value)


# Jinja would escape everything except `Markup` to HTML; `_markdown` converts all values to `Markup` first.
_ENVIRONMENT = Environment(
    loader=PackageLoader("discern.model_files", "templates"),
    autoescape=True,
    finalize=lambda value: Markup(_markdown(value)),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.globals["version"] = __version__
_ENVIRONMENT.filters |= {"code": code, "cell": cell, "quoted": quoted, "number": "{:,}".format}
