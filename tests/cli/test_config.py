from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from discern.cli.main import main
from discern.config.schema import to_toml
from discern.training.pretrain_config import load_pretrain_config


class Result:
    """Exit code and output of one command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.out)
        return found


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs `discern config ARGUMENTS`."""

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["discern", "config", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Result(int(caught.value.code or 0), captured.out, captured.err)

    return call


def test_show_prints_a_configuration_with_its_origins(config, tmp_path: Path):
    shown = config("show", "--preset", "electra-small", "--set", "train.seed=3", "--set", "train.max_hours=2")
    assert shown.code == 0
    lines = {line.split(" = ")[0]: line for line in shown.out.splitlines()}
    assert lines["seed"].split("#") == [lines["seed"].split("#")[0], " --set"]
    assert lines["num_layers"].endswith("# preset electra-small")
    assert lines["encoder"].startswith('encoder = "bert"')
    assert any(line.startswith("# micro_batch_size is none") for line in shown.out.splitlines())
    (tmp_path / "again.toml").write_text(shown.out)
    expected = load_pretrain_config(None, "electra-small", ["train.seed=3", "train.max_hours=2"]).config
    assert load_pretrain_config(tmp_path / "again.toml", None).config == expected


def test_show_as_json(config):
    shown = config("show", "--preset", "tiny", "--set", "objective.name=mlm", "--json").json
    assert shown["model"]["num_layers"] == {"value": 2, "origin": "preset tiny"}
    assert shown["train"]["max_hours"] == {"value": None, "origin": "default"}
    assert [item["key"] for item in shown["dropped"]] == ["objective.generator_size"]


def test_show_tells_what_was_dropped_and_clamped(config):
    shown = config("show", "--preset", "tiny", "--set", "objective.name=mlm", "--set", "model.max_positions=16")
    assert "# dropped: objective.generator_size = 0.5, from preset tiny" in shown.out
    assert "# preset tiny, at most model.max_positions" in shown.out
    assert tomllib.loads(shown.out)["data"]["sequence_length"] == 16


def test_show_of_nothing_says_what_there_is(config):
    refused = config("show")
    assert refused.code == 2
    assert "electra-small" in refused.err


def test_check_says_valid_or_everything_that_is_wrong(config, tmp_path: Path):
    good = config("check", "--preset", "tiny", "--set", "train.seed=1")
    assert (good.code, good.err) == (0, "")
    assert good.out.startswith("valid: ")
    assert "1 --set" in good.out
    file = tmp_path / "run.toml"
    file.write_text('extends = "tiny"\n\n[train]\nlearning_rate = 1\nmax_step = 3\n')
    bad = config("check", file)
    assert (bad.code, bad.out) == (2, "")
    assert bad.err == (
        "error: 2 problems in the configuration\n"
        f"- {file}, line 4: unknown key 'learning_rate' in [train]\n"
        "    hint: did you mean 'optimizer.learning_rate'?\n"
        f"- {file}, line 5: unknown key 'max_step' in [train]\n"
        "    hint: did you mean 'max_steps'?\n"
    )
    told = config("check", file, "--json")
    assert told.code == 2
    assert told.json["valid"] is False
    assert [problem["key"] for problem in told.json["problems"]] == ["train.learning_rate", "train.max_step"]
    assert config("check", "--preset", "tiny", "--json").json == {"valid": True, "problems": []}
    assert config("check", tmp_path / "nowhere.toml", "--json").json["problems"][0]["key"] is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.encoder=xlnet"], "encoder 'xlnet' "),
        (["objective.name=electric", "model.encoder=xlnet"], "encoder 'xlnet' cannot share its embeddings"),
        (
            ["objective.algorithm=two-stage", "objective.copy_weights=false", "objective.two_stage_steps=9", "train.max_steps=9"],
            "objective.two_stage_steps names step 9, which is not within the 9 steps of train.max_steps",
        ),
    ],
)
def test_check_finds_parts_that_do_not_fit_together(config, settings: list[str], said: str):
    chosen = [argument for setting in settings for argument in ("--set", setting)]
    bad = config("check", "--preset", "tiny", *chosen, "--json")
    assert (bad.code, bad.json["valid"]) == (2, False)
    assert said in bad.json["problems"][0]["text"]
    assert bad.json["problems"][0]["hint"]


def test_diff_takes_presets_files_and_runs(config, tmp_path: Path):
    (tmp_path / "run").mkdir()
    run = load_pretrain_config(None, "tiny", ["objective.name=mlm", "train.max_hours=1"]).config
    (tmp_path / "run" / "config.toml").write_text(to_toml(run))
    file = tmp_path / "mine.toml"
    file.write_text('extends = "tiny"\n')
    found = config("diff", file, tmp_path / "run", "--json").json
    assert {"key": "objective.name", "left": "rtd", "right": "mlm"} in found["differences"]
    assert {"key": "objective.generator_size", "left": 0.5} in found["differences"]
    assert {"key": "train.max_hours", "left": None, "right": 1.0} in found["differences"]
    table = [line.split() for line in config("diff", "tiny", tmp_path / "run").out.splitlines()]
    assert table[0] == ["key", "tiny", str(tmp_path / "run")]
    assert ["objective.generator_size", "0.5", "-"] in table
    assert ["train.max_hours", "none", "1.0"] in table
    assert config("diff", "tiny", file).out == f"tiny and {file} are the same\n"


def test_diff_of_unknown_things(config, tmp_path: Path):
    assert "did you mean 'electra-base'?" in config("diff", "tiny", "electra-bas").err
    assert "there is no configuration file" in config("diff", tmp_path / "x.toml", "tiny").err


def test_presets_are_listed(config):
    listed = config("presets")
    assert [line.split()[0] for line in listed.out.splitlines()] == list(config("presets", "--json").json["presets"])
    assert "electra-small  " in listed.out
