"""README.md of a model that was brought in from elsewhere: what came, from what, and what nobody here knows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from discern.interop.huggingface import HuggingFaceModel
from discern.interop.markdown import code, escaped, markdown_table, quoted
from discern.interop.model_card import ENERGY_ROLE, UNKNOWN, beside, gives_energies, size_rows, usage
from discern.interop.names import DISCRIMINATOR_CLASS, ENCODER_CLASS, GENERATOR_CLASS, XLNET_CLASS, XLNET_ENCODER_CLASS


@dataclass(frozen=True)
class AdoptedFacts:
    """What the workflow knows of the model.

    Attributes:
        title: heading of the card.
        origin: what it was made from, as a sentence in Markdown without its full stop.
        models: by name; the first is the one at the root.
        version: of discern.
        tokenizer: kind and casing, in words.
        max_length: tokens of a row.
        step: updates that the weights have had; None: not known.
        settings: whether the folder holds settings to measure the model by.
        left_out: what the source held besides.
        remarks: what a reader should know.
        source_card: README.md of the source; empty: none.
    """

    title: str
    origin: str
    models: Mapping[str, HuggingFaceModel]
    version: str
    tokenizer: str
    max_length: int
    step: int | None = None
    settings: bool = False
    left_out: Sequence[str] = ()
    remarks: Sequence[str] = field(default_factory=tuple)
    source_card: str = ""


_ROLES = {
    DISCRIMINATOR_CLASS: "A discriminator: it gives every token a logit, positive where the token looks *replaced*.",
    GENERATOR_CLASS: "A masked language model: it predicts the token under every `[MASK]`.",
    ENCODER_CLASS: "An encoder without a pre-training head: something to fine-tune, or to go on from.",
    XLNET_CLASS: "A permutation language model: it predicts a token from any of the others, in any order.",
    XLNET_ENCODER_CLASS: "An XLNet encoder without a head: something to fine-tune, or to go on from.",
}


def adopted_card(facts: AdoptedFacts) -> str:
    """The whole README.md."""
    sections = [_front_matter(facts), _what(facts), _use(facts), _training(facts), _limits(facts)]
    if facts.source_card.strip():
        sections.append(f"## Original model card\n\n{quoted(facts.source_card)}")
    return "\n\n".join(sections) + "\n"


def _front_matter(facts: AdoptedFacts) -> str:
    family = "xlnet" if _root(facts).config["model_type"] == "xlnet" else "electra"
    task = "pipeline_tag: fill-mask\n" if _architecture(facts) == GENERATOR_CLASS else ""
    return (
        "---\n"
        "# Fill in: the licence of the model that this was made from; it decides what others may do with these weights.\n"
        f"license:\nlibrary_name: transformers\n{task}tags:\n- {family}\n- discern\n---"
    )


def _architecture(facts: AdoptedFacts) -> str:
    return str(_root(facts).config["architectures"][0])


def _root(facts: AdoptedFacts) -> HuggingFaceModel:
    return next(iter(facts.models.values()))


def _what(facts: AdoptedFacts) -> str:
    model = _root(facts)
    config = model.config
    role = ENERGY_ROLE if gives_energies(model) else _ROLES[_architecture(facts)]
    rows = {
        "Made from": facts.origin,
        "Loads as": f"{code(_architecture(facts))}, `AutoModel` (the encoder alone)",
        "Parameters": f"{model.num_parameters:,}",
        "Weights stored as": config["dtype"],
        **size_rows(config),
        "Positions": config.get("max_position_embeddings", "relative"),
        "Vocabulary": f"{config['vocab_size']:,} entries; {facts.tokenizer}",
        "Licence": "to be filled in by whoever publishes this model",
    }
    others = [f"The folder {code(f'{name}/')} holds {beside(name, other)}" for name, other in list(facts.models.items())[1:]]
    text = " ".join([f"{role} Written by discern (distribution `discern-nlp`) {facts.version}.", *others])
    return f"# {escaped(facts.title)}\n\n{text}\n\n{markdown_table(('', ''), list(rows.items()))}"


def _use(facts: AdoptedFacts) -> str:
    # A model of 16 bits computes in 16 bits unless told otherwise.
    load = ".eval()" if _root(facts).config["dtype"] == "float32" else ".float().eval()"
    lines = usage(_architecture(facts), energies=gives_energies(_root(facts))).replace(".eval()", load)
    return f"## Use\n\n```python\nimport torch\n{lines}\n```"


def _training(facts: AdoptedFacts) -> str:
    steps = UNKNOWN if facts.step is None else f"{facts.step:,}"
    rows = {"Steps": steps, "Data, its source, language and licence": UNKNOWN, "Seed": UNKNOWN, "Scores": UNKNOWN}
    settings = (
        "\n\n`discern.toml` holds what `discern evaluate` needs to measure this model: the sizes and what the networks share are "
        "those of the weights, the rest is the recipe of the released code for a model of this width. How this one was trained, "
        "it does not say."
    )
    return f"## Training\n\n{markdown_table(('', ''), list(rows.items()))}{settings if facts.settings else ''}"


def _limits(facts: AdoptedFacts) -> str:
    limits = [f"Rows of up to {facts.max_length} tokens: `truncation=True` cuts to that."]
    if facts.left_out:
        shown = ", ".join(code(name) for name in facts.left_out[:8])
        more = f" and {len(facts.left_out) - 8} more" if len(facts.left_out) > 8 else ""
        limits.append(f"Left behind, as no verb of discern has a use for it: {shown}{more}.")
    limits += [f"{escaped(remark[:1].upper() + remark[1:])}." for remark in facts.remarks]
    limits.append(f"Tests for bias, safety and fitness for any purpose: {UNKNOWN}.")
    return "## Limits\n\n" + "\n".join(f"- {limit}" for limit in limits)
