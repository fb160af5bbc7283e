"""The model card of an import, or of an export that was made from another export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from discern.convert.cards.markdown import render
from discern.convert.cards.model import gives_energies, language_code, other_networks, sizes_of
from discern.interop.huggingface import HuggingFaceModel


@dataclass(frozen=True)
class ImportedFacts:
    """Facts for the card.

    Attributes:
        title: heading of the card.
        origin: what the model was made from, as Markdown.
        models: the networks by name; the first is at the root.
        version: version of discern.
        tokenizer: kind and casing, as text.
        max_length: maximum number of tokens per row.
        step: number of updates; None if unknown.
        settings: whether the folder holds settings to evaluate the model with.
        left_out: names of the parts of the source that were not imported.
        remarks: notes for the reader, as sentences without a full stop.
        source_card: README.md of the source; empty if there is none.
        language: language code of the text that it was trained on.
        text_license: license of that text.
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
    remarks: Sequence[str] = ()
    source_card: str = ""
    language: str | None = None
    text_license: str | None = None


def imported_card(facts: ImportedFacts) -> str:
    """Return the content of README.md."""
    name, root = next(iter(facts.models.items()))
    return render(
        "imported.md.j2",
        facts=facts,
        root=root,
        config=root.config,
        architecture=root.config["architectures"][0],
        vocab_size=root.config["vocab_size"],
        energies=gives_energies(root),
        language=language_code(facts.language),
        origin=Markup(facts.origin),
        sizes=sizes_of(root.config),
        others=other_networks({other: model for other, model in facts.models.items() if other != name}),
    )
