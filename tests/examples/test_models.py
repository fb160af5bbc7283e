"""The models that are shipped: small, whole, and good for every command that takes a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import discern
from discern.data.tokenizer import load_tokenizer
from discern.inference.detection import detect
from discern.model_files.export import FILES
from discern.model_files.folder import open_model
from discern.progress import Silent

MODELS = sorted(path.parent for path in (Path(__file__).parents[2] / "examples" / "models").glob("*/config.json"))
LARGEST = {"modern-cased": 25e6}  # bytes; others 12 million
TEXT = "The chef cooked the meal and the guests ate purple elephants."


@pytest.fixture(params=MODELS, ids=lambda folder: folder.name)
def model(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.param
    return folder


def test_small_and_whole(model: Path) -> None:
    files = {str(path.relative_to(model)): path.stat().st_size for path in model.rglob("*") if path.is_file()}
    assert files.keys() >= set(FILES)
    assert sum(files.values()) < LARGEST.get(model.name, 12e6)
    card, opened = (model / "README.md").read_text(encoding="utf-8"), open_model(model, warn=pytest.fail)
    assert "\nlicense:\n" not in card, "the license is to be filled in"
    assert opened.provenance == {"languages": ["en"], "licenses": ["CC BY-SA 3.0"]}, "what is fine-tuned from it says the same"
    assert "\nlanguage: en\n" in card
    assert "| License of the text | CC BY-SA 3.0 |" in card


def test_it_can_be_measured_and_judges(model: Path) -> None:
    assert open_model(model, warn=pytest.fail).step > 0
    if json.loads((model / "config.json").read_text())["architectures"] == ["ModernBertForMaskedLM"]:
        (best,) = discern.load(model).fill("It was built in the [MASK] century.", top=1)[0]
        assert best.token in ("19th", "20th", "18th", "17th", "16th")
        return
    (seen,) = detect(model, [TEXT], Silent(), pytest.fail)
    assert len(seen.tokens) == len(load_tokenizer(model).encode(TEXT, add_special_tokens=False))
    assert all(0 < probability < 1 for probability in seen.replaced_probability)


def test_transformers_loads_it(model: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    for part in (path.parent for path in model.glob("*/config.json")):
        tokenizer = AutoTokenizer.from_pretrained(part, local_files_only=True)
        assert tokenizer(TEXT)["input_ids"] == load_tokenizer(model).encode(TEXT).ids
    encoder, info = AutoModel.from_pretrained(model, local_files_only=True, output_loading_info=True)
    assert not info["missing_keys"]
    inputs = AutoTokenizer.from_pretrained(model, local_files_only=True)(TEXT, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == load_tokenizer(model).encode(TEXT).ids
    assert encoder.float().eval()(**inputs).last_hidden_state.isfinite().all()
