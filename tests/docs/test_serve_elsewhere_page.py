"""The page about other servers: its links, its options, and the versions that it says were tried."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

from tests.support import run_discern

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "serve-elsewhere.md"


def test_the_versions_that_were_tried_are_those_of_the_tests() -> None:
    rows = re.findall(r"^\| (.+?) \| .+ \| (.+?) \|$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    tried = {re.sub(r"\[(.*?)\].*", r"\1", name): said for name, said in rows}
    for package in ("transformers", "onnxruntime", "sentence-transformers"):
        assert tried[package].split(",")[0] == version(package), package
    for other in ("text-embeddings-inference", "vLLM", "llama.cpp", "Triton", "Optimum"):
        assert tried[other].startswith("not tried"), other


def test_options_and_links_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named, known = (
        set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", each)) for each in (text, run_discern("export", "--help").stdout)
    )
    assert named <= known, named - known
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (PAGE.parent / target).exists(), target
