"""The page about other servers: its links, its options, the versions that were tried, and the classes that load an export."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import discern
from tests.small.run import make_run
from tests.support import run_discern

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "serve-elsewhere.md"


def test_the_versions_that_were_tried_are_those_of_the_tests() -> None:
    table = PAGE.read_text(encoding="utf-8").split("\n## ")[1]
    rows = re.findall(r"^\| (.+?) \| .+ \| (.+?) \|$", table, flags=re.M)
    tried = {re.sub(r"\[(.*?)\].*", r"\1", name): said for name, said in rows}
    for package in ("transformers", "onnxruntime", "sentence-transformers"):
        assert tried[package].split(",")[0] == version(package), package
    for other in ("text-embeddings-inference", "vLLM", "Infinity", "llama.cpp", "Triton", "Optimum"):
        assert tried[other] == "not run here", other


def test_options_and_links_exist() -> None:
    text = re.sub(r"```text.*?```", "", PAGE.read_text(encoding="utf-8"), flags=re.S)
    shown = text, *(run_discern(verb, "--help").stdout for verb in ("export", "finetune"))
    named, *known = (set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", each)) for each in shown)
    assert named <= set.union(*known), named
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (PAGE.parent / target).exists(), target


@pytest.mark.parametrize(
    ("overrides", "network", "form"),
    [
        ((), "generator", None),
        (("objective.name=mlm", "model.embedding_size=32", "model.hidden_size=32"), None, "bert"),
        (("model.encoder=modernbert", "model.local_window=8"), "generator", None),
        (("model.encoder=deberta", "model.position_buckets=8"), "generator", None),
    ],
)
def test_sentence_transformers_loads_every_encoder(
    overrides: tuple[str, ...], network: str | None, form: Any, tmp_path: Path
) -> None:
    from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder

    make_run(tmp_path / "run", overrides=overrides)
    discern.export(tmp_path / "run", out=tmp_path / "vectors", as_=form, sentence_transformers=True, pooling="mean-all")
    discern.export(tmp_path / "run", out=tmp_path / "words", as_=form, network=network)
    texts = ["a quiet street.", "the old town has a bridge of stone."]
    offline: dict[str, Any] = {"device": "cpu", "local_files_only": True}
    vectors = SentenceTransformer(str(tmp_path / "vectors"), **offline).encode(texts)
    assert vectors.shape == discern.load(tmp_path / "vectors").encode(texts).shape
    sparse: Any = SparseEncoder(str(tmp_path / "words"), **offline)
    assert [type(module).__name__ for module in sparse] == ["Transformer", "SpladePooling"]
    assert sparse.encode(texts).shape == (2, sparse.tokenizer.vocab_size)
    assert len(MultiVectorEncoder(str(tmp_path / "vectors"), **offline).encode(texts)[0]) > 1
