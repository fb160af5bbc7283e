"""One validated configuration from preset, files and --set: origins, variants, problems, and the way back to TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

import pytest
from pydantic import BaseModel, Field, SerializeAsAny, model_validator

from discern.config.resolve import InvalidConfigError, Origin, Resolution, Resolved, Setting, collect, parse_overrides, resolve
from discern.config.schema import ABSENT, Section, Variant, diff, expectation, flatten, to_toml, toml_value
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


DISHES: Mapping[str, type[Dish]] = {"cake": Cake, "soup": Dish}


def dish_model(name: str) -> type[BaseModel]:
    if name not in DISHES:
        raise ConfigError(f"unknown dish '{name}'", hint=did_you_mean(name, DISHES))
    return DISHES[name]


def seat(work: Resolution) -> None:
    """Nobody eats without a chair."""
    servings, seats = work.value("dish.servings"), work.value("table.seats")
    if servings > seats and "dish.servings" in work.user_set:
        work.refuse("dish.servings", f"is {servings}, beyond table.seats, which is {seats}", f"--set table.seats={servings}")
    elif servings > seats:
        work.set_value("dish.servings", seats, "at most table.seats")


def cook(*overrides: str, file: Path | None = None, **preset: object) -> Resolved[Recipe]:
    """Resolve a recipe from a made-up preset, a file and --set."""
    given = {key.replace("_", ".", 1): Setting(value, Origin("preset", "preset sunday")) for key, value in preset.items()}
    given |= collect(None, file, overrides) if file is not None else parse_overrides(overrides)
    return resolve(Recipe, given, {"dish": Variant("name", dish_model, lambda: sorted(DISHES), "dish")}, seat)


def refusal(*overrides: str, **preset: object) -> tuple[str, str | None]:
    """Message and hint of the one problem with these overrides."""
    with pytest.raises(InvalidConfigError) as caught:
        cook(*overrides, **{"dish_name": "cake"} | preset)
    assert len(caught.value.problems) == 1, caught.value
    return caught.value.message, caught.value.hint


def test_defaults_presets_and_overrides_give_one_validated_configuration() -> None:
    resolved = cook(
        "dish.layers=5", "oven.temperature='99.5'", "oven.rest=none", "oven.timer=none", dish_name="cake", oven_minutes=4e1
    )
    oven, dish = resolved.config.oven, resolved.config.dish
    assert (oven.minutes, oven.temperature, oven.rest, oven.timer, oven.mode) == (40, 99.5, None, None, "fan")
    assert isinstance(dish, Cake)
    assert dish.layers == 5
    origins = {key: resolved.origins[key] for key in ("oven.minutes", "dish.layers", "oven.mode")}
    assert origins == {"oven.minutes": "preset sunday", "dish.layers": "--set", "oven.mode": "default"}
    assert resolved.user_set == {"dish.layers", "oven.temperature", "oven.rest", "oven.timer"}
    assert resolved.origins.keys() == flatten(resolved.config).keys()


def test_another_variant_drops_what_the_preset_meant_for_the_first(tmp_path: Path) -> None:
    resolved = cook("dish.name=soup", dish_name="cake", dish_layers=3, dish_servings=2)
    assert flatten(resolved.config)["dish.servings"] == 2
    (dropped,) = resolved.dropped
    assert (dropped.key, dropped.value, dropped.origin) == ("dish.layers", 3, "preset sunday")
    assert dropped.reason == "[dish] with name = 'soup' does not accept it"
    # What the user set stays strict, and a preset that contradicts itself is wrong.
    (tmp_path / "cake.toml").write_text('[dish]\nname = "cake"\nlayers = 3\n')
    with pytest.raises(InvalidConfigError, match=r"cake\.toml, line 3: unknown key 'layers' in \[dish\] with name = 'soup'"):
        cook("dish.name=soup", file=tmp_path / "cake.toml")
    assert refusal("dish.name=soup", "dish.layers=3")[1] == "dish 'cake' has it: --set dish.name=cake"
    with pytest.raises(InvalidConfigError, match="unknown key 'layers'"):
        cook(dish_name="soup", dish_layers=3)


def test_a_value_the_user_left_alone_is_lowered_and_one_they_set_is_refused() -> None:
    lowered = cook(dish_name="cake", dish_servings=8)
    assert (lowered.config.dish.servings, lowered.origins["dish.servings"]) == (6, "preset sunday, at most table.seats")
    assert cook("table.seats=3", dish_name="cake").origins["dish.servings"] == "default, at most table.seats"
    assert refusal("dish.servings=9") == ("--set: dish.servings is 9, beyond table.seats, which is 6", "--set table.seats=9")


def test_every_problem_is_told_at_once() -> None:
    wrong = ["oven.minuts=3", "oven.mode=grll", "dish.layers=0", "tabel.seats=1", "seats=3", "oven.preheat=7", "dish=1"]
    with pytest.raises(InvalidConfigError) as caught:
        cook(*wrong, dish_name="cake")
    assert {problem.key for problem in caught.value.problems} == {override.partition("=")[0] for override in wrong}
    assert caught.value.message.startswith("7 problems")
    assert caught.value.exit_code == 2
    assert "pydantic" not in str(caught.value)
    assert "Input should" not in str(caught.value)
    with pytest.raises(InvalidConfigError) as caught:
        cook("dish.name=soop", "oven.minutes=0", dish_name="cake", dish_layers=3)
    assert [problem.text for problem in caught.value.problems] == [
        "--set: unknown dish 'soop'",
        "--set: oven.minutes is 0; expected a whole number of at least 1",
    ]
    assert caught.value.problems[0].hint == "did you mean 'soup'?"
    with pytest.raises(InvalidConfigError, match=r"dish\.name is missing\n.*known: cake, soup"):
        cook()


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("oven.minuts=3", "unknown key 'minuts' in [oven]", "did you mean 'minutes'?"),
        ("dish.layer=3", "unknown key 'layer' in [dish] with name = 'cake'", "did you mean 'layers'?"),
        ("table.minutes=3", "unknown key 'minutes' in [table]", "did you mean 'oven.minutes'?"),
        ("table.zzz=3", "unknown key 'zzz' in [table]", "known: seats"),
        ("minutes=3", "unknown key 'minutes'", "did you mean 'oven.minutes'?"),
        ("ofen.minutes=3", "unknown key 'minutes' in [ofen]", "did you mean 'oven.minutes'?"),
        ("ofen.xyz=3", "unknown key 'xyz' in [ofen]", "did you mean 'oven'?"),
        ("xyz.abc=3", "unknown key 'abc' in [xyz]", "known: dish, oven, table"),
        ("table=3", "unknown key 'table'", "known: seats"),
    ],
)
def test_an_unknown_key_is_told_with_the_likeliest_one(override: str, message: str, hint: str) -> None:
    assert refusal(override) == (f"--set: {message}", hint)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("minutes=many", "is 'many'; expected a whole number of at least 1"),
        ("minutes=1.5", "is 1.5; expected a whole number of at least 1"),
        ("minutes=true", "is true; expected a whole number of at least 1"),
        ("minutes=none", "is 'none'; expected a whole number of at least 1"),
        ("temperature=nan", "is nan; expected a number above 0 and of at most 300"),
        ("rest=inf", "is inf; expected a number above 0 or 'none'"),
        ("rest=false", "is false; expected a number above 0 or 'none'"),
        ("preheat=2", "is 2; expected true or false"),
        ("light=2", "is 2; expected true, false or 'auto'"),
        ("mode=3", "is 3; expected one of 'fan', 'grill'"),
        ("shelves=[1, 'two']", "is [1, 'two']; expected a list"),
    ],
)
def test_a_wrong_value_is_told_with_what_was_expected(override: str, message: str) -> None:
    key = override.partition("=")[0]
    description = Oven.model_fields[key].description
    assert refusal(f"oven.{override}") == (f"--set: oven.{key} {message}", f"oven.{key}: {description}")
    assert expectation(Oven.model_fields[key]) in message


def test_rules_between_fields_and_between_sections_name_the_origins() -> None:
    said = "[oven] minutes 90 is too long for mode grill (minutes: preset sunday, mode: --set)"
    assert refusal("oven.mode=grill", oven_minutes=90)[0] == said
    said = "dish.name soup cannot stand under oven.mode grill (dish.name: preset sunday, oven.mode: --set)"
    assert refusal("oven.mode=grill", dish_name="soup")[0] == said


def test_toml_is_complete_and_reads_back_the_same(tmp_path: Path) -> None:
    given = ["oven.timer=none", "oven.temperature=1e-12", "oven.shelves=[3, 1]", "dish.layers=7", "dish.name=cake"]
    config = cook(*given).config
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    again = cook(file=path)
    assert again.config == config
    assert type(again.config.dish) is type(config.dish)
    written = tomllib.loads(to_toml(config))
    assert "rest" not in written["oven"]  # none is its default
    assert written["oven"]["timer"] == "none"
    assert {key for key, value in flatten(config).items() if value is not None} <= again.user_set
    assert (toml_value([1, 2]), toml_value('say "x"\n'), toml_value(1e-6)) == ("[ 1, 2, ]", r'"say \"x\"\n"', "1e-06")


def test_differences_name_what_only_one_side_has() -> None:
    left, right = cook("oven.minutes=3", dish_name="cake").config, cook(dish_name="soup").config
    assert diff(left, right) == [("oven.minutes", 3, 20), ("dish.name", "cake", "soup"), ("dish.layers", 2, ABSENT)]
    assert diff(left, left) == []


# The layers


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1_000", 1000),
        ("1e-3", 1e-3),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('"quoted = text"', "quoted = text"),
        ("packed", "packed"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_an_override_is_toml_where_it_can_be_and_text_otherwise(text: str, value: object) -> None:
    setting = parse_overrides([f"train.x={text}"])["train.x"]
    assert (setting.value, type(setting.value), setting.origin.label) == (value, type(value), "--set")


def test_overrides_win_over_earlier_ones_and_those_without_a_value_are_all_named() -> None:
    settings = parse_overrides(["a.b=1", "a.b=2", "c={d = 3, e = {f = 4}}"])
    assert {key: setting.value for key, setting in settings.items()} == {"a.b": 2, "c.d": 3, "c.e.f": 4}
    with pytest.raises(ConfigError, match=r"--set train\.seed: expected section\.key=value\n--set =5: ") as caught:
        parse_overrides(["train.seed", "train.max_steps=3", "=5"])
    assert "max_steps=3" not in caught.value.message


def test_later_layers_win_and_every_value_keeps_its_origin(tmp_path: Path) -> None:
    write(tmp_path / "base" / "common.toml", 'extends = "tiny"\n[train]\nseed = 1\nmax_steps = 1\nlog_every_steps = 1\n')
    text = 'extends = "base/common.toml"\n# a comment\ndata.packing = "packed"\n[train]  # here\n max_steps = 7\nseed = 3\n'
    settings = collect(None, write(tmp_path / "run.toml", text), ["train.seed=4"])
    assert (settings["train.seed"].value, settings["train.seed"].origin.where) == (4, "--set")
    assert settings["train.max_steps"].origin.where == f"{tmp_path / 'run.toml'}, line 5"
    assert settings["data.packing"].origin.where.endswith("run.toml, line 3")
    assert settings["train.log_every_steps"].origin.label.endswith("common.toml")
    assert (settings["model.num_layers"].origin.label, settings["model.num_layers"].origin.by_user) == ("preset tiny", False)
    assert "extends" not in settings
    assert collect("electra-small-plusplus", None, [])["model.num_layers"].origin.label == "preset electra-small"


def test_a_preset_below_a_file(tmp_path: Path) -> None:
    plain, based = write(tmp_path / "a.toml", "train.max_steps = 3\n"), write(tmp_path / "b.toml", 'extends = "tiny"\n')
    settings = collect("tiny", plain, [])
    assert (settings["train.max_steps"].value, settings["model.num_layers"].value) == (3, 2)
    assert collect("tiny", based, [])["model.num_layers"].value == 2
    with pytest.raises(ConfigError, match=r"second base\n.*--preset"):
        collect("electra-small", based, [])


def test_a_run_folder_stands_for_its_configuration(tmp_path: Path) -> None:
    write(tmp_path / "run" / "config.toml", "[train]\nseed = 9\n")
    assert collect(None, tmp_path / "run", [])["train.seed"].value == 9


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[train]\nprecision = float32\n", "not valid TOML"),
        (b"[train]\n\xff\xfe\n", "in position 8"),
        (b"extends = 3\n", "extends is 3"),
        (b'extends = "missing.toml"\n', "missing.toml is missing"),
        (b'extends = "tin"\n', "unknown preset 'tin'\n  hint: did you mean 'tiny'?"),
        (b'extends = "./run.toml"\n', "extends itself"),
        (None, "there is no configuration file"),
    ],
)
def test_unreadable_files_are_explained(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "run.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        collect(None, file, [])
    assert says in str(caught.value)


@pytest.mark.parametrize(("file", "says"), [(None, "presets: .*electra-small"), (Path("tiny"), "--preset tiny")])
def test_a_preset_is_suggested_where_there_is_no_file(file: Path | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        collect(None, file, [])
