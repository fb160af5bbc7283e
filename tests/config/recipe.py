"""A small configuration with two variants of one section, for the tests of the machinery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, Field, SerializeAsAny, model_validator

from discern.config.layers import Origin, Setting, Settings, collect, parse_overrides
from discern.config.resolve import Resolution, Resolved, resolve
from discern.config.schema import Section, Variant
from discern.errors import ConfigError, did_you_mean


class Oven(Section):
    """One section with every sort of value."""

    temperature: float = Field(180.0, gt=0, le=300, description="Degrees Celsius.")
    minutes: int = Field(20, ge=1, description="How long it bakes.")
    mode: Literal["fan", "grill"] = Field("fan", description="Where the heat comes from.")
    preheat: bool = Field(True, description="Whether it is hot when the dish goes in.")
    light: bool | Literal["auto"] = Field("auto", description="Whether it is lit; auto: while it bakes.")
    rest: float | None = Field(None, gt=0, description="Minutes to stand; none: eat at once.")
    timer: float | None = Field(5.0, gt=0, description="Minutes between looks; none: never look.")
    shelves: list[int] = Field([1], description="Which shelves are used.")
    heights: tuple[float, ...] = Field((1.0, 2.5), description="Of the shelves.")

    @model_validator(mode="after")
    def _grill_is_quick(self) -> Self:
        if self.mode == "grill" and self.minutes > 60:
            raise ValueError(f"minutes {self.minutes} is too long for mode grill")
        return self


class Dish(Section):
    """What every dish has."""

    name: str = Field(description="Which dish.")
    servings: int = Field(4, ge=1, description="How many eat.")


class Cake(Dish):
    """A dish with layers."""

    layers: int = Field(2, ge=1, description="Layers of the cake.")


class Soup(Dish):
    """A dish without layers."""

    litres: float = Field(1.0, gt=0, description="How much.")


class Table(Section):
    """Another section."""

    seats: int = Field(6, ge=1, description="Chairs.")


class Recipe(Section):
    """The composed configuration."""

    oven: Oven = Field(default_factory=Oven)
    dish: SerializeAsAny[Dish]
    table: Table = Field(default_factory=Table)

    @model_validator(mode="after")
    def _no_soup_in_the_oven(self) -> Self:
        if self.dish.name == "soup" and self.oven.mode == "grill":
            raise ValueError("dish.name soup cannot stand under oven.mode grill")
        return self


DISHES: Mapping[str, type[Dish]] = {"cake": Cake, "soup": Soup}


def dish_model(name: str) -> type[BaseModel]:
    if name not in DISHES:
        raise ConfigError(f"unknown dish '{name}'", hint=did_you_mean(name, DISHES))
    return DISHES[name]


VARIANTS = {"dish": Variant("name", dish_model, lambda: sorted(DISHES))}


def seat(work: Resolution) -> None:
    """Nobody eats without a chair."""
    servings, seats = work.value("dish.servings"), work.value("table.seats")
    if servings > seats and "dish.servings" in work.user_set:
        work.refuse("dish.servings", f"is {servings}, beyond table.seats, which is {seats}", f"--set table.seats={servings}")
    elif servings > seats:
        work.set_value("dish.servings", seats, "at most table.seats")


def from_preset(values: Mapping[str, object], label: str = "preset sunday") -> Settings:
    return {key: Setting(value, Origin("preset", label)) for key, value in values.items()}


def cook(preset: Mapping[str, object] | None = None, overrides: Sequence[str] = ()) -> Resolved[Recipe]:
    """Resolve a recipe from a made-up preset and --set."""
    start = {"dish.name": "cake"} if preset is None else preset
    return resolve(Recipe, from_preset(start) | parse_overrides(overrides), VARIANTS, seat)


def cook_file(path: Path, overrides: Sequence[str] = ()) -> Resolved[Recipe]:
    return resolve(Recipe, collect(None, path, overrides), VARIANTS, seat)
