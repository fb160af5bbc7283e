"""Build the site: copy the pages, add the recorded output of the tutorials, run Sphinx.

    python -m docs._sphinx.build [--out site]

Pages keep their places relative to each other (docs/, benchmarks/records/, examples/models/, CHANGELOG.md), so that a relative
link works both on a code host and in the site. Warnings, dead links and dead anchors among them, are errors.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from docs._sphinx.tutorials import with_output

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
STAGED = (
    "docs",
    "benchmarks",
    "examples",
    "LICENSE",
    "CITATION.cff",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "README.zh.md",
)
_KINDS = {".md", ".sbatch", ".yaml", ".png", ".svg", ".py", ".sh", ".toml", ".cff", ".css", ""}
_LEFT_OUT = {"_sphinx", "recorded", "__pycache__", "generator"}
_INSTALL = "Sphinx is not installed, or not completely ({}): pip install 'discern-nlp[docs]'"


def stage(target: Path) -> None:
    """Copy what the site shows or links to, at the same relative paths."""
    for name in STAGED:
        source = ROOT / name
        files = sorted(source.rglob("*")) if source.is_dir() else [source]
        for path in files:
            relative = path.relative_to(ROOT)
            if path.is_file() and path.suffix in _KINDS and not _LEFT_OUT & set(relative.parts):
                _write(target / relative, path.read_bytes())
    _write(target / "index.md", (HERE / "index.md").read_bytes())


def add_output(target: Path) -> None:
    """Add the recorded output to the tutorials."""
    for page in sorted((target / "docs" / "tutorials").glob("*.md")):
        page.write_text(with_output(page.read_text(encoding="utf-8"), page.stem), encoding="utf-8")


def _write(path: Path, content: bytes) -> None:
    """Write a file unless it has this content: Sphinx reads again only what is newer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_bytes() != content:
        path.write_bytes(content)


def build(out: Path) -> int:
    """Build the site from nothing; returns the exit code of Sphinx, or 1 if the folder holds something else than a site."""
    if out.exists() and not (out / "searchindex.js").is_file() and not (out.is_dir() and not any(out.iterdir())):
        print(f"{out} is not empty and not a site: choose another --out", file=sys.stderr)
        return 1
    try:
        import furo  # noqa: F401
        import myst_parser  # noqa: F401
        from sphinx.cmd.build import build_main
    except ImportError as problem:
        print(_INSTALL.format(problem.name), file=sys.stderr)
        return 1
    staged = ROOT / "build" / "site"
    made = ROOT / "build" / "html"
    for folder in (staged, made):
        shutil.rmtree(folder, ignore_errors=True)
    stage(staged)
    add_output(staged)
    options = ["-b", "html", "-q", "-W", "--keep-going", "-c", str(HERE), "-d", str(ROOT / "build" / "doctrees")]
    code = build_main([*options, "-E", str(staged), str(made)])
    if code == 0:  # a build that fails leaves the last site as it was
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(made, out)
    return code


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the site of the documentation.")
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder of the site; it is replaced")
    out = parser.parse_args().out
    began = time.perf_counter()
    code = build(out)
    if code == 0:
        pages = sum(1 for _ in out.rglob("*.html"))
        print(f"{out}/index.html: {pages} pages in {time.perf_counter() - began:.0f} seconds")
    sys.exit(code)


if __name__ == "__main__":
    main()
