"""The file of a comparison: what it may say, and what is said of one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from discern.compare.plan import CompareConfig, as_overrides, load_compare_config
from discern.errors import ConfigError
from discern.training.config import load_pretrain_config

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*/*.toml"))


def load(tmp_path: Path, text: str) -> CompareConfig:
    path = tmp_path / "compare.toml"
    path.write_text(text)
    return load_compare_config(path)


def test_settings_are_flat_however_they_are_written_and_paths_are_beside_the_file(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
tasks = ["rte"]
config = "base.toml"
task_data = { rte = "data/RTE" }
[[run]]
name = "a"
config = "a.toml"
[run.set]
objective.name = "mlm"
"train.seed" = 3
[run.set.optimizer]
learning_rate = 1e-3
""",
    )
    assert config.run[0].set == {"objective.name": "mlm", "train.seed": 3, "optimizer.learning_rate": 1e-3}
    assert config.config == tmp_path / "base.toml"
    assert config.run[0].config == tmp_path / "a.toml"
    assert config.task_data == {"rte": tmp_path / "data" / "RTE"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "run: field required"),
        ("[[run]]\nset = 3", "run.0.name: field required\n- run.0.set: input should be a valid dictionary"),
        ('[[run]]\nname = "a"\nbudgt = 2', "run.0.budgt: extra inputs are not permitted"),
        ('equal = "watts"\n[[run]]\nname = "a"', "equal: input should be 'flops', 'seconds' or 'tokens'"),
        ('[[run]]\nname = "a/b"', "run.0.name: string should match pattern"),
        ('[[run]]\nname = "a"\n[[run]]\nname = "a"', "several rows are called a"),
        ('[[run]]\nname = "a"\nbudget = 0.5', "'a' is the reference"),
        ('baseline = true\n[[run]]\nname = "untrained"', "several rows are called untrained"),
        ('[[run]]\nname = "a"\n[finetune.task_set.rte]\ntask.x = 1', "given for rte, which the list of tasks lacks"),
        ("[[run]\n", "is not valid TOML"),
        (None, "is missing"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_compare_config(tmp_path / "none.toml") if text is None else load(tmp_path, text)
    assert message.lower() in str(caught.value).lower()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples(path: Path) -> None:
    config = load_compare_config(path)
    assert len(config.run) >= 2
    for run in config.run:
        overrides = [*as_overrides(config.set), *as_overrides(run.set)]
        resolved = load_pretrain_config(run.config or config.config, run.preset or config.preset, overrides).config
        assert resolved.train.max_hours is None
