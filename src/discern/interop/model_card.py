"""README.md of an export: what the model is and where it comes from. Facts only; what is unknown is "not recorded"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from discern.interop.config_json import read_mark
from discern.interop.huggingface import ENERGY, HuggingFaceModel
from discern.interop.markdown import code, escaped, markdown_table
from discern.interop.names import (
    DISCRIMINATOR_CLASS,
    ENCODER_CLASS,
    GENERATOR_CLASS,
    HEAD_NAME,
    TWO_TOWER_CLASS,
    XLNET_CLASS,
    XLNET_ENCODER_CLASS,
)

UNKNOWN = "not recorded"
NOT_STATED = "not stated"
OBJECTIVE_NAMES = {
    "rtd": "replaced token detection (ELECTRA)",
    "mlm": "masked language modelling (BERT)",
    "electric": "noise-contrastive estimation of energies (Electric)",
    "replace-mlm": "masked language modelling without `[MASK]` (Replace MLM)",
    "all-tokens-mlm": "masked language modelling of all tokens, with a copy mechanism (All-Tokens MLM)",
    "rtd-masked-only": "replaced token detection at the chosen positions only (ELECTRA 15%)",
    "permutation-lm": "permutation language modelling (XLNet)",
}
# Keys of config.json that a size can stand under.
_SIZES = {
    "Layers": ("num_hidden_layers", "n_layer"),
    "Hidden size": ("hidden_size", "d_model"),
    "Embedding size": ("embedding_size", "d_model"),
    "Attention heads": ("num_attention_heads", "n_head"),
    "Feed-forward size": ("intermediate_size", "d_inner"),
}


ENERGY_ROLE = (
    "The energy model: it gives every token an energy in nats, high where the token is unlikely among the others; "
    "exp(-energy) estimates its probability, and minus their sum the log-likelihood of a text."
)


@dataclass(frozen=True)
class CardFacts:
    """What the workflow knows of the model. An empty mapping or None means that it is not known.

    Attributes:
        title: heading of the card.
        network: name among the objective's networks.
        model: config.json and the weights.
        others: the networks in folders of their own, by name.
        version: of discern.
        objective: name in the registry.
        step: updates done.
        settings: of the run, by dotted key ("data.sequence_length").
        reference: name of the preset that `differences` are from.
        differences: (key, value here, value there).
        data: statistics of the data set.
        tokens_seen: real tokens read in training, repetitions included.
        evaluation: held-out figures by name.
        evaluated_at: step they are of.
        versions: of Python and the libraries.
        tokenizer: kind and casing, in words.
        language: code of the language of the text.
        text_license: of the text, as whoever prepared it said.
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
    tokens_seen: int | None = None
    evaluation: Mapping[str, float] = field(default_factory=dict)
    evaluated_at: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    language: str | None = None
    text_license: str | None = None


def model_card(facts: CardFacts) -> str:
    """The whole README.md."""
    sections = (_front_matter, _what, _files, _use, _training, _recipe, _evaluation, _limits)
    return "\n\n".join(section(facts) for section in sections) + "\n"


def _front_matter(facts: CardFacts) -> str:
    family = facts.model.config["model_type"]
    task = "pipeline_tag: fill-mask\n" if _holds(facts, GENERATOR_CLASS) else ""
    return (
        "---\n"
        "# Fill in the license of these weights. The license of the training text may restrict the choice.\n"
        f"license:\n{language_line(facts.language)}library_name: transformers\n{task}tags:\n"
        f"- {family}\n- {facts.objective}\n- discern\n---"
    )


def language_line(language: str | None) -> str:
    """The line of a card's YAML that names the language; Norwegian quoted, as YAML reads a bare `no` as false."""
    if language is not None and not re.fullmatch(r"[A-Za-z]{2,8}(-[A-Za-z0-9]{1,8})*", language):
        return ""  # no code, and YAML that somebody else wrote
    return "" if language is None else "language: 'no'\n" if language == "no" else f"language: {language}\n"


def _what(facts: CardFacts) -> str:
    config = facts.model.config
    roles = {
        "discriminator": "The discriminator: it gives every token a logit, positive where the token looks *replaced*.",
        "generator": "The generator: a small masked language model, which proposed replacements to a discriminator.",
        "encoder": _ENCODER_ROLES.get(facts.objective, "An encoder with its head."),
    }
    role = ENERGY_ROLE if gives_energies(facts.model) else roles.get(facts.network, f"The network '{escaped(facts.network)}'.")
    sizes = {
        "Loads as": f"`{config['architectures'][0]}`, `AutoModel` (the encoder alone)",
        "Objective": OBJECTIVE_NAMES.get(facts.objective) or escaped(facts.objective),
        "Parameters": _parameters(facts),
        "Weights stored as": config["dtype"],
        **size_rows(config),
        "Positions": _positions(facts),
        "Vocabulary": f"{_number(config['vocab_size'])} entries; {facts.tokenizer}",
        "Licence": "to be filled in by whoever publishes this model",
    }
    made = f"Pre-trained from scratch with discern (distribution `discern-nlp`) {facts.version}."
    return f"# {escaped(facts.title)}\n\n{role} {made}\n\n{markdown_table(('', ''), list(sizes.items()))}"


_ENCODER_ROLES = {
    "mlm": "A masked language model: it predicts the token under every `[MASK]`.",
    "permutation-lm": "A permutation language model: it predicts a token from any of the others, in any order.",
}


def _files(facts: CardFacts) -> str:
    """What stands in the folder, where it is more than transformers knows of."""
    lines = ["`config.json`, `model.safetensors`, `tokenizer.json`, `tokenizer_config.json`: what transformers loads."]
    if facts.model.head:
        lines.append(
            f"`{HEAD_NAME}`: the whole head of the {facts.network}, dense and bilinear. ELECTRA has no place for the bilinear "
            "term, so transformers loads the encoder alone; `discern detect` judges with the head."
        )
    for name, model in facts.others.items():
        lines.append(f"{code(f'{name}/')}: {beside(name, model)} `discern evaluate` needs it.")
    lines.append("`discern.toml`: every setting of the run.")
    return "## Files\n\n" + "\n".join(f"- {line}" for line in lines)


def size_rows(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that config.json states, whichever family's keys it has."""
    return {label: next(config[key] for key in keys if key in config) for label, keys in _SIZES.items()}


def _use(facts: CardFacts) -> str:
    # A model of 16 bits computes in 16 bits unless told otherwise.
    load = ".eval()" if facts.model.config["dtype"] == "float32" else ".float().eval()"
    architecture = facts.model.config["architectures"][0]
    lines = usage(architecture, energies=gives_energies(facts.model), objective=facts.objective)
    text = f"## Use\n\n```python\nimport torch\n{lines.replace('.eval()', load)}\n```"
    if gives_energies(facts.model):
        verbs = ["discern score . TEXTS  # one text a line"]
    else:
        verbs = [] if _fills(facts) else ['discern detect . --text "The chef ate the meal."']
    if facts.others or facts.network == "encoder":
        verbs.append("discern evaluate . --data DATA  # made by: discern prepare TEXT --out DATA --tokenizer .")
    return text + ("\n\nOr with discern:\n\n```\n" + "\n".join(verbs) + "\n```" if verbs else "")


def usage(architecture: str, *, energies: bool = False, objective: str = "") -> str:
    """Lines of Python that load a model with transformers and run it.

    Args:
        architecture: class of transformers that holds it.
        energies: its numbers are no logits but energies.
        objective: what it was trained by, where that decides how it is run.
    """
    if architecture in (ENCODER_CLASS, XLNET_ENCODER_CLASS):
        return """from transformers import AutoModel, AutoTokenizer

folder = "."  # this folder: the encoder alone, its pre-training head has no form in transformers
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModel.from_pretrained(folder).eval()
inputs = tokenizer("The chef ate the meal.", return_tensors="pt")
with torch.no_grad():
    states = model(**inputs).last_hidden_state
print(inputs.tokens(), tuple(states.shape))"""
    if architecture == DISCRIMINATOR_CLASS and energies:
        return """from transformers import AutoTokenizer, ElectraForPreTraining

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder)
model = ElectraForPreTraining.from_pretrained(folder).eval()
inputs = tokenizer("The chef ate the meal.", return_tensors="pt")
with torch.no_grad():
    energies = model(**inputs).logits[0]
for token, energy in list(zip(inputs.tokens(), energies.tolist()))[1:-1]:
    print(f"{energy:.2f} {token}")
print(-energies[1:-1].sum().item())  # pseudo-log-likelihood of the text, in nats"""
    if architecture == DISCRIMINATOR_CLASS:
        return """from transformers import AutoTokenizer, ElectraForPreTraining

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder)
model = ElectraForPreTraining.from_pretrained(folder).eval()
inputs = tokenizer("The chef ate the meal.", return_tensors="pt")
with torch.no_grad():
    replaced = torch.sigmoid(model(**inputs).logits[0])
for token, probability in zip(inputs.tokens(), replaced.tolist()):
    print(f"{probability:.2f} {token}")"""
    if architecture == XLNET_CLASS:
        return _XLNET_CODE.format(streams=_CONTENT_STREAM if objective == "mlm" else _QUERY_STREAM)
    return """from transformers import AutoTokenizer, ElectraForMaskedLM

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder)
model = ElectraForMaskedLM.from_pretrained(folder).eval()
inputs = tokenizer(f"The chef {tokenizer.mask_token} the meal.", return_tensors="pt")
with torch.no_grad():
    logits = model(**inputs).logits[inputs["input_ids"] == tokenizer.mask_token_id][0]
print(tokenizer.convert_ids_to_tokens(logits.topk(5).indices.tolist()))"""


_XLNET_CODE = """from transformers import AutoTokenizer, XLNetLMHeadModel

folder = "."  # this folder
tokenizer = AutoTokenizer.from_pretrained(folder)
model = XLNetLMHeadModel.from_pretrained(folder).eval()
inputs = tokenizer(f"The chef {{tokenizer.mask_token}} the meal.", return_tensors="pt")
where = inputs["input_ids"] == tokenizer.mask_token_id
{streams}
print(tokenizer.convert_ids_to_tokens(logits.topk(5).indices.tolist()))"""
_CONTENT_STREAM = """with torch.no_grad():
    logits = model(**inputs).logits[where][0]"""
_QUERY_STREAM = """query = where[:, None, :].float()  # one query, at that place, which nobody may see
with torch.no_grad():
    logits = model(**inputs, perm_mask=query.expand(-1, where.shape[1], -1), target_mapping=query).logits[0, 0]"""


def _training(facts: CardFacts) -> str:
    data, settings = facts.data, facts.settings
    unknown = data.get("unknown_fraction")
    rows = {
        "Documents": _number(data.get("documents")),
        "Tokens in the data set": _number(data.get("tokens")),
        "Unknown tokens": UNKNOWN if unknown is None else f"{unknown:.3%}",
        "Source of the text": UNKNOWN,
        "License of the text": escaped(facts.text_license or NOT_STATED),
        "Steps": _number(facts.step),
        "Sequences a step": _number(settings.get("train.sequences_per_step")),
        "Sequence length": _number(settings.get("data.sequence_length")),
        "Rows": settings.get("data.packing", UNKNOWN),
        "Tokens seen, repetitions included": _number(facts.tokens_seen),
        "Seed": settings.get("train.seed", UNKNOWN),
        "Precision setting": settings.get("train.precision", UNKNOWN),
        "Made with": escaped(", ".join(f"{name} {version}" for name, version in facts.versions.items())) or UNKNOWN,
    }
    return f"## Training\n\n{markdown_table(('', ''), list(rows.items()))}"


def _recipe(facts: CardFacts) -> str:
    standing = (
        "Whatever its settings, discern draws the positions to mask without replacement and counts only maskable tokens; the "
        "released ELECTRA code draws them with replacement and counts `[CLS]` and `[SEP]` too."
    )
    if facts.reference is None:
        return f"## Recipe\n\nDifferences from a published recipe: {UNKNOWN}. {standing}"
    if not facts.differences:
        return f"## Recipe\n\nThe settings of preset `{facts.reference}`, sizes apart. {standing}"
    rows = [(f"`{key}`", _value(here), _value(there)) for key, here, there in facts.differences]
    table = markdown_table(("setting", "here", f"`{facts.reference}`"), rows)
    return f"## Recipe\n\nWhere the settings differ from preset `{facts.reference}`, sizes apart:\n\n{table}\n\n{standing}"


def _evaluation(facts: CardFacts) -> str:
    if not facts.evaluation:
        return f"## Evaluation\n\nHeld-out figures: {UNKNOWN}. Downstream tasks: {UNKNOWN}."
    table = markdown_table(("figure", "value"), [(code(name), f"{value:.4f}") for name, value in facts.evaluation.items()])
    precision = facts.model.config["dtype"]
    rounded = "" if precision == "float32" else f", before the weights were rounded to {precision}"
    when = f"at step {_number(facts.evaluated_at)}" if facts.evaluated_at is not None else f"at a step that is {UNKNOWN}"
    return (
        f"## Evaluation\n\nOn the held-out part of the data set, {when}{rounded}. Losses are means in nats, everything else is a "
        f"fraction in 0-1.\n\n{table}\n\nDownstream tasks: {UNKNOWN}."
    )


def _limits(facts: CardFacts) -> str:
    limits = []
    if _fills(facts):
        limits.append("This network fills masks; it cannot tell replaced tokens from real ones.")
    elif gives_energies(facts.model):
        limits.append("This network gives energies: neither probabilities that a token was replaced nor words for a mask.")
    elif not facts.others:
        limits.append("This network judges tokens; it cannot fill masks.")
    else:
        limits.append(f"This network judges tokens; to fill masks take the one in {_listed(facts.others)}.")
    trained, table = _trained_positions(facts), facts.model.config.get("max_position_embeddings")
    if table is None:
        limits.append(f"Distances of more than {trained} tokens, and what memory added to them, have not been trained.")
    elif isinstance(trained, int) and trained < table:
        limits.append(f"Positions from {trained} on still have their initial values: cut texts to {trained} tokens.")
    if facts.settings.get("data.packing") == "packed":
        limits.append("It was trained on single segments: the embedding of `token_type_ids` 1 still has its initial value.")
    limits.append(f"Tests for bias, safety and fitness for any purpose: {UNKNOWN}.")
    return "## Limits\n\n" + "\n".join(f"- {limit}" for limit in limits)


def beside(name: str, model: HuggingFaceModel) -> str:
    """What a network in a folder of its own is."""
    loads_as, size = model.config["architectures"][0], _number(model.num_parameters)
    if loads_as == TWO_TOWER_CLASS:
        return f"the {escaped(name)}, two towers of {size} parameters, which discern can load and transformers cannot."
    return f"the {escaped(name)}, an ordinary {code(loads_as)} of {size} parameters; the tokenizer is the same."


def gives_energies(model: HuggingFaceModel) -> bool:
    """Whether the numbers of a network are energies, where they would be logits otherwise."""
    return read_mark(model.config).get("gives") == ENERGY


def _fills(facts: CardFacts) -> bool:
    """Whether the network predicts words."""
    return _holds(facts, GENERATOR_CLASS) or _holds(facts, XLNET_CLASS)


def _holds(facts: CardFacts, architecture: str) -> bool:
    return architecture in facts.model.config["architectures"]


def _listed(names: Iterable[str]) -> str:
    return " or ".join(code(f"{name}/") for name in names)


def _parameters(facts: CardFacts) -> str:
    whole = _number(facts.model.num_parameters)
    beside = sum(tensor.numel() for tensor in facts.model.head.values())
    return f"{whole}, of which {_number(beside)} in the head that transformers cannot hold" if beside else whole


def _positions(facts: CardFacts) -> str:
    table, trained = facts.model.config.get("max_position_embeddings"), _trained_positions(facts)
    return f"relative; rows of {trained} were trained" if table is None else f"{table}, of which {trained} were trained"


def _trained_positions(facts: CardFacts) -> int | str:
    length = facts.settings.get("data.sequence_length")
    return min(int(length), facts.model.config.get("max_position_embeddings", int(length))) if length else UNKNOWN


def _value(value: object) -> str:
    return UNKNOWN if value is None else f"{value:g}" if isinstance(value, float) else escaped(value)


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else UNKNOWN
