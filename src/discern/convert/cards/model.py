"""The model card of a run's network. A fact that is not known is shown as "not recorded"."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from markupsafe import Markup
from tokenizers import Tokenizer

from discern import __version__
from discern.artifacts.huggingface import weights_outside_networks
from discern.artifacts.model_folder import TEXT_LICENSE
from discern.artifacts.run import RunFolder
from discern.config.layers import preset_names
from discern.config.schema import diff, flatten
from discern.convert.cards.markdown import render
from discern.convert.forms import BERT_LM_CLASS
from discern.data.tokenizer import load_tokenizer, lowercases
from discern.interop.config_json import ENERGY, read_mark
from discern.interop.huggingface import HuggingFaceModel
from discern.interop.names import GENERATOR_CLASS, MODERNBERT_LM_CLASS, TWO_TOWER_CLASS, XLNET_CLASS
from discern.training.metrics_log import held_out_metrics, read_metrics
from discern.training.pretrain_config import PretrainConfig, load_pretrain_config

OBJECTIVE_NAMES = {
    "rtd": "replaced token detection (ELECTRA)",
    "mlm": "masked language modeling (BERT)",
    "electric": "noise-contrastive estimation of energies (Electric)",
    "replace-mlm": "masked language modeling without `[MASK]` (Replace MLM)",
    "all-tokens-mlm": "masked language modeling of all tokens, with a copy mechanism (All-Tokens MLM)",
    "rtd-masked-only": "replaced token detection at the chosen positions only (ELECTRA 15%)",
    "permutation-lm": "permutation language modeling (XLNet)",
}
# Keys of config.json for each size: ELECTRA's, then XLNet's.
_SIZE_KEYS = {
    "Layers": ("num_hidden_layers", "n_layer"),
    "Hidden size": ("hidden_size", "d_model"),
    "Embedding size": ("embedding_size", "d_model"),
    "Attention heads": ("num_attention_heads", "n_head"),
    "Feed-forward size": ("intermediate_size", "d_inner"),
}
# Settings that don't change the model: intervals of writing, and ways to compute the same numbers.
_HOUSEKEEPING = ["checkpoint_every_steps", "keep_checkpoints", "evaluate_every_steps", "evaluate_sequences", "log_every_steps"]
_HOUSEKEEPING += ["tensorboard", "tracker", "micro_batch_size", "compile", "gradient_checkpointing", "seed"]
_SIZES = ["num_layers", "hidden_size", "embedding_size", "num_heads", "feedforward_size", "max_positions", "num_token_types"]
_NO_DIFFERENCE = {*(f"train.{name}" for name in _HOUSEKEEPING), *(f"model.{name}" for name in _SIZES)}
# Settings that distinguish recipes more than any size does.
_KINDS = {"model.initialization", "model.normalization", "objective.tying", "objective.discriminator_head"}


@dataclass(frozen=True)
class ModelFacts:
    """Facts for the card. An empty mapping or None means that a fact is not known.

    Attributes:
        title: heading of the card.
        network: name of the network at the root.
        model: config.json and weights of that network.
        version: version of discern.
        objective: name of the objective in the registry.
        step: number of updates.
        settings: settings of the run by dotted key ("data.sequence_length").
        tokenizer: kind and casing, as text.
        others: the networks in folders of their own, by name.
        reference: name of the preset that `differences` compares with.
        differences: (key, value here, value in the preset).
        data: statistics of the data set.
        is_whole: whether the networks hold all weights of the objective.
        tokens_seen: number of tokens read in training, repetitions included, padding excluded.
        evaluation: held-out metrics by name.
        evaluated_at: step of the evaluation.
        versions: versions of Python and the libraries.
        language: language code of the text.
        text_license: license of the text.
        overlap: overlap of the text with each evaluation file, as in the record of the run; None if it was not checked.
        start: name of the model whose weights the run started from; None: it started from random weights.
        replay: fraction of the rows that come from another data set; None if there is none.
    """

    title: str
    network: str
    model: HuggingFaceModel
    version: str
    objective: str
    step: int
    settings: Mapping[str, Any]
    tokenizer: str
    others: Mapping[str, HuggingFaceModel] = field(default_factory=dict)
    reference: str | None = None
    differences: Sequence[tuple[str, Any, Any]] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    is_whole: bool = True
    tokens_seen: int | None = None
    evaluation: Mapping[str, float] = field(default_factory=dict)
    evaluated_at: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    language: str | None = None
    text_license: str | None = None
    overlap: Sequence[Mapping[str, Any]] | None = None
    start: str | None = None
    replay: float | None = None


@dataclass(frozen=True)
class OtherNetwork:
    """A network in a folder of its own."""

    name: str
    architecture: str
    two_towers: bool
    parameters: int


def model_card(facts: ModelFacts) -> str:
    """Return the content of README.md."""
    config = facts.model.config
    architecture = config["architectures"][0]
    # Rotary positions have no table; the length that a ModernBERT states is not a size.
    rotary = config["model_type"] == "modernbert"
    positions = None if rotary else config.get("max_position_embeddings")
    length = facts.settings.get("data.sequence_length")
    unknown_tokens = facts.data.get("unknown_fraction")
    objective = OBJECTIVE_NAMES.get(facts.objective)
    own_head = {name: tensor for name, tensor in facts.model.head.items() if name not in facts.model.factors}
    return render(
        "model.md.j2",
        facts=facts,
        config=config,
        architecture=architecture,
        energies=gives_energies(facts.model),
        fills_masks=architecture in (GENERATOR_CLASS, MODERNBERT_LM_CLASS, XLNET_CLASS, BERT_LM_CLASS),
        rotary=rotary,
        language=language_code(facts.language),
        objective=facts.objective if objective is None else Markup(objective),
        sizes=sizes_of(config),
        head_parameters=sum(tensor.numel() for tensor in own_head.values()),
        copy_gate=bool(own_head) and all("copy_gate" in name for name in own_head),
        positions=positions,
        trained_positions=min(int(length), positions or int(length)) if length else None,
        others=other_networks(facts.others),
        overlap=None if facts.overlap is None else list(zip(distinct_names(facts.overlap), facts.overlap, strict=True)),
        unknown_tokens=None if unknown_tokens is None else f"{unknown_tokens:.3%}",
        made_with=", ".join(f"{name} {version}" for name, version in facts.versions.items()),
    )


def language_code(language: str | None) -> str:
    """Return a language code for the front matter, or "" for anything else, which could inject YAML."""
    if language is None or not re.fullmatch(r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8})*", language):
        return ""
    return "'no'" if language == "no" else language  # YAML reads a bare `no`, Norwegian, as false


def distinct_names(overlap: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the evaluation files: the shortest ends of their paths that are all different."""
    paths = [PurePath(each["file"]).parts for each in overlap]
    deepest = max(map(len, paths), default=1)
    ends = ([path[-depth:] for path in paths] for depth in range(1, deepest + 1))
    chosen = next((parts for parts in ends if len(set(parts)) == len(parts)), paths)
    return ["/".join(parts) for parts in chosen]


def sizes_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes in a config.json of either family, by label."""
    found = {label: [config[key] for key in keys if key in config] for label, keys in _SIZE_KEYS.items()}
    return {label: sizes[0] for label, sizes in found.items() if sizes}


def gives_energies(model: HuggingFaceModel) -> bool:
    """Whether the outputs of a network are energies rather than logits."""
    return read_mark(model.config).get("gives") == ENERGY


def tokenizer_kind(tokenizer: Tokenizer) -> str:
    """Return kind and casing of a tokenizer, as "WordPiece, lower-cased"."""
    return f"{type(tokenizer.model).__name__}, {'lower-cased' if lowercases(tokenizer) else 'cased'}"


def other_networks(models: Mapping[str, HuggingFaceModel]) -> list[OtherNetwork]:
    """Return the facts of networks in folders of their own."""
    classes = {name: model.config["architectures"][0] for name, model in models.items()}
    return [
        OtherNetwork(name, classes[name], classes[name] == TWO_TOWER_CLASS, model.num_parameters)
        for name, model in models.items()
    ]


def facts_of_run(run: RunFolder, models: Mapping[str, HuggingFaceModel], title: str) -> ModelFacts:
    """Collect the facts of an export. They contain no paths and no host names.

    Args:
        models: the exported networks by name; the first is at the root.
    """
    records = [record for record in read_metrics(run.folder) if record.get("step", 0) <= run.step]
    evaluated: dict[str, Any] = next((record for record in reversed(records) if "heldout_loss" in record), {})
    reference = _reference(run.config)
    (network, model), *others = models.items()
    return ModelFacts(
        title=title,
        network=network,
        model=model,
        others=dict(others),
        version=__version__,
        objective=run.config.objective.name,
        step=run.step,
        settings=flatten(without_paths(run.config)),
        tokenizer=tokenizer_kind(load_tokenizer(run.tokenizer_path)),
        reference=reference,
        differences=_differences(without_paths(run.config), reference) if reference else (),
        data=run.record.get("statistics", {}),
        language=run.record.get("language"),
        text_license=run.record.get(TEXT_LICENSE),
        overlap=run.record.get("overlap"),
        start=_start(run.record),
        replay=run.record.get("replay", {}).get("share"),
        is_whole=not weights_outside_networks(run.objective),
        tokens_seen=run.tokens,
        evaluation=held_out_metrics(evaluated),
        evaluated_at=evaluated.get("step"),
        versions={"discern": run.record.get("discern", "unknown"), **run.record.get("versions", {})},
    )


def without_paths(config: PretrainConfig) -> PretrainConfig:
    """Return the settings of a run as an export tells them: the generator's checkpoint by its name alone."""
    source = config.objective.generator_source
    if source is None:
        return config
    named = config.objective.model_copy(update={"generator_checkpoint": PurePath(source).name})
    return config.model_copy(update={"objective": named})


def _start(record: Mapping[str, Any]) -> str | None:
    """Return the name of the model that a run started from, also if it is the decay of such a run; no path."""
    found = record.get("start") or record.get("decay", {}).get("start")
    return None if found is None else PurePath(found["model"]).name


def _reference(config: PretrainConfig) -> str | None:
    """Return the preset to compare with: of the same objective, with the same initialization and weight sharing if possible,
    and the nearest hidden size. `tiny` and `demo` are not recipes."""
    presets = {name: _preset(name) for name in preset_names() if name not in ("tiny", "demo")}
    same = [name for name, preset in presets.items() if preset.objective.name == config.objective.name]

    def distance(name: str) -> tuple[int, int, int]:
        differences = [key for key, *_ in _differences(config, name)]
        kinds = sum(key in _KINDS for key in differences)
        return kinds, abs(presets[name].model.hidden_size - config.model.hidden_size), len(differences)

    return min(same, key=distance, default=None)


def _differences(config: PretrainConfig, preset: str) -> list[tuple[str, Any, Any]]:
    """Return the settings that differ from a preset, except sizes and housekeeping."""
    return [pair for pair in diff(config, _preset(preset)) if pair[0] not in _NO_DIFFERENCE]


def _preset(name: str) -> PretrainConfig:
    return load_pretrain_config(None, name).config
