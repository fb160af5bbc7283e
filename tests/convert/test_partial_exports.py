"""Objectives of which an export is not a plain pair of networks, or does not hold all that measuring them needs."""

from pathlib import Path

import pytest
import torch

from discern.artifacts.opening import open_model
from discern.convert.export import export
from discern.errors import ConfigError
from discern.models.heads import EnergyHead
from discern.progress import Silent
from tests.small.run import make_run
from tests.support import run_python


@pytest.mark.parametrize(
    ("setting", "lost"),
    [
        ("objective.sentence_contrastive_weight=1.0", "sentence_contrast.head"),
        ("objective.generator=unigram", "generator_frequencies"),
    ],
)
def test_what_an_export_lacks_is_refused_by_name(tmp_path: Path, setting: str, lost: str) -> None:
    make_run(tmp_path / "run", overrides=[setting])
    warnings: list[str] = []
    export(tmp_path / "run", out=tmp_path / "export", all_networks=True, progress=Silent(), warn=warnings.append)
    assert len(warnings) == 1
    assert lost in warnings[0]
    assert "discern evaluate" not in (tmp_path / "export" / "README.md").read_text()
    with pytest.raises(ConfigError, match=lost) as caught:
        assert open_model(tmp_path / "export", warn=pytest.fail).objective
    assert "discern evaluate RUN" in (caught.value.hint or "")
    assert open_model(tmp_path / "run", warn=pytest.fail).step == 20


@pytest.mark.parametrize("setting", ["objective.name=electric", "objective.generator=two-tower"])
def test_two_towers_go_along_and_are_measured(setting: str, tmp_path: Path) -> None:
    objective = make_run(tmp_path / "run", overrides=[setting])
    export(tmp_path / "run", out=tmp_path / "out", all_networks=True, progress=Silent(), warn=pytest.fail)
    again = open_model(tmp_path / "out", warn=pytest.fail).objective
    state = again.state_dict()
    for name, value in objective.state_dict().items():
        assert torch.equal(state[name], value), name
    assert "transformers cannot" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(ConfigError, match="transformers has no such model") as caught:
        export(tmp_path / "run", out=tmp_path / "g", network="generator", progress=Silent(), warn=pytest.fail)
    assert "--all-networks" in (caught.value.hint or "")


def test_the_card_of_an_energy_model_speaks_of_energies(tmp_path: Path) -> None:
    make_run(tmp_path / "run", overrides=["objective.name=electric"])
    export(tmp_path / "run", out=tmp_path / "out", progress=Silent(), warn=pytest.fail)
    card = (tmp_path / "out" / "README.md").read_text()
    for line in ("# out\n\nThe energy model:", "(Electric)", "discern score .", "pseudo-log-likelihood"):
        assert line in card, line
    assert "discern detect" not in card
    assert "looks *replaced*" not in card
    code = card.split("```python\n")[1].split("```")[0].replace('folder = "."', f'folder = "{tmp_path / "out"}"')
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    *energies, total = done.stdout.splitlines()
    assert float(total) == pytest.approx(-sum(float(line.split()[0]) for line in energies), abs=0.01 * len(energies))
    export(tmp_path / "out", out=tmp_path / "half", precision="bfloat16", progress=Silent(), warn=pytest.fail)
    assert isinstance(open_model(tmp_path / "half", warn=pytest.fail).networks(beside=False)["discriminator"].head, EnergyHead)
