"""The page about exports: the classes of transformers that it names load every weight, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from discern.model_files.export import export
from discern.progress import Silent
from tests.small.run import make_run

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "export.md"


def load(name: str, folder: Path) -> None:
    """Load a folder by a class of transformers; no weight may be missing or left over."""
    _, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), (name, info)


@pytest.mark.parametrize(("row", "head"), [("discriminator; a pos", "dense"), ("discriminator with a bilinear term", "bilinear")])
def test_the_classes_for_modernbert_load_every_weight_and_the_code_runs(
    row: str, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGE.read_text(encoding="utf-8")
    named = dict(re.findall(r"^\| (.+?) \| `\w+` \| `(\w+)`.*? \|$", page, flags=re.M))
    monkeypatch.chdir(tmp_path)
    make_run(
        tmp_path / "run",
        overrides=["model.encoder=modernbert", "model.embedding_size=32", f"objective.discriminator_head={head}"],
    )
    for out, everything in (("models/first", False), ("models/small", True)):
        export(tmp_path / "run", out=tmp_path / out, all_networks=everything, progress=Silent(), warn=pytest.fail)
    load(next(name for network, name in named.items() if network.startswith(row)), tmp_path / "models/first")
    load(named["generator, masked language model"], tmp_path / "models/small/generator")
    names: dict[str, Any] = {}
    block = page.split("```python\n")[1].split("```")[0]
    exec(compile(block, PAGE.name, "exec"), names)
    words = names["tokenizer"]("a quiet street", return_tensors="pt")
    assert names["encoder"](**words).last_hidden_state.isfinite().all()
    assert names["generator"](**words).logits.isfinite().all()
