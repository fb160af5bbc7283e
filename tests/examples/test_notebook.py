"""The notebook runs from top to bottom in an empty folder, and shows bars, a plot and scores."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="install discern-nlp[test]: it runs the notebook")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebooks" / "first-encoder.ipynb"
# What makes it a matter of seconds; everything else is run as written.
SMALL = {
    "collect(4_000_000,": "collect(300_000,",
    "vocab_size=4096": "vocab_size=1000",
    '{} if torch.cuda.is_available() else {"train.max_hours": 1.5 / 60}': '{"train.max_steps": 30}',
    "min(250, len(texts))": "40",
}


def test_the_notebook_is_committed_without_outputs() -> None:
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert 5 <= len(cells) <= 40
    assert all(cell.outputs == [] and cell.execution_count is None and not cell.metadata for cell in cells)


def test_the_notebook_runs_in_an_empty_folder(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for written, small in SMALL.items():
        assert sum(written in cell.source for cell in notebook.cells) == 1
        for cell in notebook.cells:
            cell.source = cell.source.replace(written, small)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=tmp_path)

    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    shown = {name: "".join(output.get("text", "") for output in each) for name, each in outputs.items()}
    bars = [output.data.get("text/html", "") for output in outputs["pretrain"] if output.output_type == "display_data"]
    assert len(bars) == 1
    assert "30/30 steps" in bars[0]
    assert any("image/png" in output.get("data", {}) for output in outputs["curves"])
    assert re.search(r"accuracy: [01]\.\d\d on \d+ held-out rows", shown["finetune"])
    assert re.search(r"ModernBertModel \(128,\) largest difference: \S+e-0[678]", shown["export"])
