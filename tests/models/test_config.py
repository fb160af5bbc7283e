"""Each encoder has its own settings, and nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from discern.config.resolve import InvalidConfigError
from discern.config.schema import flatten
from discern.models import encoders
from discern.models.config import LONGEST_SEQUENCE, ModelConfig, build_config, config_class
from discern.models.electra.config import ElectraConfig
from discern.models.xlnet.config import XLNetConfig
from discern.training.config import load_pretrain_config


def refusal(preset: str, *overrides: str, file: Path | None = None) -> tuple[str, str | None]:
    with pytest.raises(InvalidConfigError) as caught:
        load_pretrain_config(file, preset, overrides)
    assert len(caught.value.problems) == 1, caught.value
    return caught.value.message, caught.value.hint


@pytest.mark.parametrize(
    ("preset", "override", "message", "hint"),
    [
        (
            "tiny",
            "model.clamp_length=20",
            "--set: unknown key 'clamp_length' in [model] with encoder = 'bert'",
            "encoder 'xlnet' has it: --set model.encoder=xlnet",
        ),
        (
            "xlnet-cpu",
            "model.normalization=pre",
            "--set: unknown key 'normalization' in [model] with encoder = 'xlnet'",
            "encoder 'bert' has it: --set model.encoder=bert",
        ),
        (
            "tiny",
            "model.hiden_size=20",
            "--set: unknown key 'hiden_size' in [model] with encoder = 'bert'",
            "did you mean 'hidden_size'?",
        ),
        ("tiny", "model.encoder=bart", "--set: unknown encoder 'bart'", "did you mean 'bert'?"),
    ],
)
def test_a_key_of_another_encoder_is_unknown(preset: str, override: str, message: str, hint: str) -> None:
    assert refusal(preset, override) == (message, hint)


def test_a_key_of_another_encoder_in_a_file_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[model]\nclamp_length = 20\n")
    assert "line 2: unknown key 'clamp_length'" in refusal("tiny", file=tmp_path / "mine.toml")[0]


def test_a_key_of_the_preset_is_dropped_with_its_encoder() -> None:
    resolved = load_pretrain_config(None, "cpu-small", ["model.encoder=xlnet", "objective.name=mlm"])
    assert isinstance(resolved.config.model, XLNetConfig)
    dropped = {each.key: each.reason for each in resolved.dropped if each.key.startswith("model.")}
    assert dropped == {"model.initialization": "[model] with encoder = 'xlnet' does not accept it"}


def test_a_record_is_read() -> None:
    config = build_config(hidden_size=32, num_heads=2)
    assert build_config(config.model_dump()) == config
    with pytest.raises(ValueError, match="no_such_key"):
        build_config(config.model_dump(), no_such_key=0)


def test_settings_are_those_of_the_encoder_that_is_named() -> None:
    assert type(build_config()) is ElectraConfig
    assert type(build_config(encoder="xlnet")) is XLNetConfig
    assert type(load_pretrain_config(None, "tiny").config.model) is ElectraConfig


@pytest.mark.parametrize("name", encoders.names())
def test_every_encoder_names_itself(name: str) -> None:
    config = config_class(name)()
    assert config.encoder == name
    assert issubclass(config_class(name), ModelConfig)
    assert config.changeable <= type(config).model_fields.keys()
    assert flatten(config) == {**{key: getattr(config, key) for key in config.changeable}, **config.fixed()}
    assert config.max_positions <= LONGEST_SEQUENCE
