"""The page about other servers: its links, its options, and the versions that it says were tried."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import version
from pathlib import Path

from discern.cli.export import export

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
    known = {str(flag) for each in inspect.get_annotations(export, eval_str=True).values() for flag in _flags(each)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))
    assert named <= known | {"--out"}, named - known
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (PAGE.parent / target).exists(), target


def _flags(annotation: object) -> list[str]:
    """The names of an option; typer takes the first as the default of an option that has no other."""
    return [name for each in getattr(annotation, "__metadata__", ()) for name in (each.default, *(each.param_decls or ()))]
