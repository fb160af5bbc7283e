"""Objectives of which an export does not hold all that measuring them needs."""

from pathlib import Path

import pytest

from discern.errors import ConfigError
from discern.progress import Silent
from discern.workflows.export import ExportRequest, export
from discern.workflows.models import load_objective
from tests.workflows.small_run import make_run


@pytest.mark.parametrize(
    ("setting", "lost"),
    [
        ("objective.sentence_contrastive_weight=1.0", "sentence_contrast.head"),
        ("objective.generator=unigram", "generator_frequencies"),
    ],
)
def test_what_an_export_lacks_is_refused_by_name(tmp_path: Path, setting: str, lost: str) -> None:
    make_run(tmp_path / "run", overrides=[setting])
    export(ExportRequest(tmp_path / "run", tmp_path / "export", all_networks=True), Silent(), pytest.fail)
    with pytest.raises(ConfigError, match=lost) as caught:
        load_objective(tmp_path / "export", warn=pytest.fail)
    assert "discern evaluate RUN" in (caught.value.hint or "")
    assert load_objective(tmp_path / "run", warn=pytest.fail).step == 20
