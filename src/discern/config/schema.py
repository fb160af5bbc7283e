"""The keys that a configuration has: sections and fields by dotted name, the chosen variants included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from discern.config.fields import alternatives


@dataclass(frozen=True)
class Variant:
    """A section whose keys depend on one of its values, as [objective] depends on its name.

    Attributes:
        key: the field that decides.
        model: from that field's value to the section's model; raises ConfigError for an unknown value.
        known: every value that `model` takes.
    """

    key: str
    model: Callable[[str], type[BaseModel]]
    known: Callable[[], Sequence[str]]


@dataclass(frozen=True)
class Schema:
    """Every key of a configuration.

    Attributes:
        root: the composed model.
        sections: the model of each section by dotted name; "" is the root.
        fields: each leaf by dotted name.
        chosen: the value that decided on a section, by section: {"objective": "name = 'mlm'"}.
    """

    root: type[BaseModel]
    sections: Mapping[str, type[BaseModel]]
    fields: Mapping[str, FieldInfo]
    chosen: Mapping[str, str]

    @classmethod
    def of(cls, root: type[BaseModel], models: Mapping[str, type[BaseModel]], chosen: Mapping[str, str]) -> Schema:
        """The keys under `root`, with the section models in `models` in place of the declared ones."""
        sections: dict[str, type[BaseModel]] = {"": root}
        fields: dict[str, FieldInfo] = {}
        pending = [("", root)]
        while pending:
            prefix, model = pending.pop(0)
            for name, field in model.model_fields.items():
                key = f"{prefix}{name}"
                section = models.get(key) or section_model(field)
                if section is None:
                    fields[key] = field
                else:
                    sections[key] = section
                    pending.append((f"{key}.", section))
        return cls(root, sections, fields, chosen)

    def names(self, section: str) -> list[str]:
        """The names in a section, sub-sections included."""
        return list(self.sections[section].model_fields)

    def note(self, section: str) -> str:
        """Which variant of a section applies, for messages: " with name = 'mlm'", or nothing."""
        return f" with {self.chosen[section]}" if section in self.chosen else ""


def section_model(field: FieldInfo) -> type[BaseModel] | None:
    """The model behind a field that is a section; None for a plain value."""
    models = [kind for kind in alternatives(field) if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return models[0] if models else None
