"""The file of a comparison: what it may say, and what is said of one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from discern.compare.settings import load_compare_config
from discern.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*/*.toml"))


def load(tmp_path: Path, text: str):  # type: ignore[no-untyped-def]
    path = tmp_path / "compare.toml"
    path.write_text(text)
    return load_compare_config(path)


def test_settings_are_flat_however_they_are_written_and_paths_are_beside_the_file(tmp_path: Path) -> None:
    found = load(
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
    assert found.run[0].set == {"objective.name": "mlm", "train.seed": 3, "optimizer.learning_rate": 1e-3}
    assert found.config == tmp_path / "base.toml"
    assert found.run[0].config == tmp_path / "a.toml"
    assert found.task_data == {"rte": tmp_path / "data" / "RTE"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ["there is no [[run]]"]),
        ("run = []", ["there is no [[run]]"]),
        ("[[run]]\nset = 3", ["[[run]] number 1", "'name' is missing"]),
        ('[[run]]\nname = "a"\nbudgt = 2', ["[[run]] number 1 ('a')", "unknown key 'budgt'", "did you mean 'budget'?"]),
        ('equl = "flops"\n[[run]]\nname = "a"', ["unknown key 'equl'", "did you mean 'equal'?"]),
        ('equal = "watts"\n[[run]]\nname = "a"', ["equal is 'watts'", "'flops'"]),
        ('[[run]]\nname = "a/b"', ["letters, digits"]),
        ('[[run]]\nname = "a"\n[[run]]\nname = "a"', ["several runs are called a"]),
        ('[[run]]\nname = "a"\nbudget = 0.5', ["'a' is the reference"]),
        ('[[run]]\nname = "a"\n[[run]]\nname = "b"\nset = { train.max_steps = 5 }', ["'b' sets train.max_steps", "budget = 0.5"]),
        ('[[run]]\nname = "a"\n[[run]]\nname = "b"\nset = { train.seed = 5 }', ["'b' sets train.seed", "seeds of 'a'"]),
        ('baseline = true\n[[run]]\nname = "untrained"', ["name of the baseline"]),
        ('tasks = ["rt"]\n[[run]]\nname = "a"', ["unknown task 'rt'"]),
        ('tasks = ["rte", "rte"]\n[[run]]\nname = "a"', ["named twice"]),
        ('[[run]]\nname = "a"\n[finetune.task_set.rte]\ntask.x = 1', ["given for rte, not among the tasks (none)"]),
        ("[[run]\n", ["is not valid TOML"]),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, says: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    for part in says:
        assert part in str(caught.value), str(caught.value)


def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_compare_config(tmp_path / "none.toml")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples(path: Path) -> None:
    from discern.compare.settings import as_overrides
    from discern.training.pretrain_config import load_pretrain_config

    found = load_compare_config(path)
    for run in found.run:
        overrides = [*as_overrides(found.set), *as_overrides(run.set)]
        config = load_pretrain_config(run.config or found.config, run.preset or found.preset, overrides).config
        assert config.train.max_hours is None
    assert len(found.run) >= 2
