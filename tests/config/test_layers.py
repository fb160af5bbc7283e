from __future__ import annotations

from pathlib import Path

import pytest

from discern.config import layers
from discern.config.layers import collect, parse_overrides
from discern.errors import ConfigError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1000", 1000),
        ("1_000", 1000),
        ("1e-3", 1e-3),
        ("-2.5", -2.5),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('"quoted = text"', "quoted = text"),
        ("packed", "packed"),
        ("a=b", "a=b"),
        ("", ""),
        ("none", "none"),
        ("1\ny = 2", "1\ny = 2"),
    ],
)
def test_an_override_is_toml_where_it_can_be_and_text_otherwise(text: str, value: object):
    setting = parse_overrides([f"train.x={text}"])["train.x"]
    assert setting.value == value
    assert type(setting.value) is type(value)
    assert str(setting.origin) == "--set"


def test_the_last_of_two_overrides_wins_and_a_table_sets_its_keys():
    settings = parse_overrides(["a.b=1", "a.b=2", "c={d = 3, e = {f = 4}}"])
    assert {key: setting.value for key, setting in settings.items()} == {"a.b": 2, "c.d": 3, "c.e.f": 4}


def test_overrides_without_a_value_are_all_named():
    with pytest.raises(ConfigError, match=r"section\.key=value") as caught:
        parse_overrides(["train.seed", "train.max_steps=3", "=5"])
    assert "--set train.seed:" in caught.value.message
    assert "--set =5:" in caught.value.message
    assert "max_steps=3" not in caught.value.message


def test_nothing_to_start_from_is_refused_with_the_presets():
    with pytest.raises(ConfigError) as caught:
        collect(None, None, [])
    assert "electra-small" in (caught.value.hint or "")


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ConfigError, match="electra-smal'") as caught:
        collect("electra-smal", None, [])
    assert caught.value.hint == "did you mean 'electra-small'?"


def test_later_layers_win_and_every_value_keeps_its_origin(tmp_path: Path):
    file = write(tmp_path / "run.toml", 'extends = "tiny"\n[train]\nmax_steps = 7\nseed = 3\n')
    settings = collect(None, file, ["train.seed=4"])
    assert (settings["train.seed"].value, str(settings["train.seed"].origin)) == (4, "--set")
    assert (settings["train.max_steps"].value, str(settings["train.max_steps"].origin)) == (7, str(file))
    assert str(settings["model.num_layers"].origin) == "preset tiny"
    assert settings["train.max_steps"].origin.where == f"{file}, line 3"
    assert [settings[key].origin.by_user for key in ("train.seed", "train.max_steps", "model.num_layers")] == [True, True, False]


def test_a_preset_keeps_the_origin_of_what_it_extends():
    settings = collect("electra-small-plusplus", None, [])
    assert str(settings["objective.generator_size"].origin) == "preset electra-small-plusplus"
    assert str(settings["model.num_layers"].origin) == "preset electra-small"


def test_files_extend_files_beside_them(tmp_path: Path):
    write(tmp_path / "base" / "common.toml", 'extends = "tiny"\n[train]\nseed = 1\nmax_steps = 1\n')
    write(tmp_path / "middle.toml", 'extends = "base/common.toml"\n[train]\nmax_steps = 2\n')
    top = write(tmp_path / "top.toml", 'extends = "./middle.toml"\n')
    settings = collect(None, top, [])
    assert (settings["train.seed"].value, settings["train.max_steps"].value, settings["model.num_layers"].value) == (1, 2, 2)
    assert str(settings["train.seed"].origin).endswith("common.toml")
    assert "extends" not in settings


def test_a_circle_of_files_is_refused(tmp_path: Path):
    write(tmp_path / "one.toml", 'extends = "two.toml"\n')
    write(tmp_path / "two.toml", 'extends = "one.toml"\n')
    with pytest.raises(ConfigError, match=r"one\.toml -> two\.toml -> one\.toml"):
        collect(None, tmp_path / "one.toml", [])


def test_a_preset_beside_another_base_is_refused_and_the_same_one_is_not(tmp_path: Path):
    file = write(tmp_path / "run.toml", 'extends = "tiny"\n')
    assert collect("tiny", file, [])["model.num_layers"].value == 2
    with pytest.raises(ConfigError, match="second base") as caught:
        collect("electra-small", file, [])
    assert "--preset" in (caught.value.hint or "")


def test_a_preset_below_a_file_without_base(tmp_path: Path):
    file = write(tmp_path / "run.toml", "train.max_steps = 3\n")
    settings = collect("tiny", file, [])
    assert (settings["train.max_steps"].value, settings["model.num_layers"].value) == (3, 2)
    assert settings["train.max_steps"].origin.where.endswith("line 1")


def test_a_run_folder_stands_for_its_configuration(tmp_path: Path):
    write(tmp_path / "run" / "config.toml", "[train]\nseed = 9\n")
    assert collect(None, tmp_path / "run", [])["train.seed"].value == 9
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"without config\.toml"):
        collect(None, tmp_path / "empty", [])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[train]\nprecision = float32\n", "not valid TOML"),
        (b"[train]\n\xff\xfe\n", "not UTF-8 text (byte 8)"),
        (b"extends = 3\n", "extends is 3"),
        (b'extends = ""\n', "extends is ''"),
        (b'extends = "missing.toml"\n', "there is no file"),
        (b'extends = "tin"\n', "unknown preset 'tin'"),
    ],
)
def test_unreadable_files_are_explained(tmp_path: Path, content: bytes, says: str):
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        collect(None, file, [])
    assert says in caught.value.message


def test_a_missing_file_that_is_a_preset_says_so(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        collect(None, Path("tiny"), [])
    assert "--preset tiny" in (caught.value.hint or "")
    with pytest.raises(ConfigError, match=r"there is no configuration file .*nowhere\.toml"):
        collect(None, tmp_path / "nowhere.toml", [])


def test_lines_are_found_under_headers_dotted_keys_and_comments():
    text = '# a comment\ntop = 1\n[train]  # here\n  seed = 2\n# max_steps = 3\n[model.sub]\n"odd" = 4\nx.y = 5\n'
    assert layers._line_numbers(text) == {"top": 2, "train.seed": 4, "model.sub.x.y": 8}
