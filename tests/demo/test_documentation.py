from pathlib import Path

import pytest

from discern.demo import documentation
from discern.demo.documentation import collect

MODULE = '''"""The first paragraph is about the module as a whole and long enough::

    literal text that is indented further is left out of it

>>> an_example()
that is left out

- The first bullet has enough words to be kept here.
- The second bullet is a paragraph of its own.

========  =====
a table   is no
========  =====
"""

class Something:
    """A class of :class:`~package.Thing` with ``marked up`` words and some more of them."""

    def method(self):
        """Short."""
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python installation of three packages."""
    for name in ("first", "second", "third"):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "module.py").write_text(MODULE.replace("as a whole", f"as a whole, the {name},"))
        (tmp_path / name / "tests" / "test_it.py").write_text(
            '"""A test module has documentation that nobody should read at all."""'
        )
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00")
    paths = {name: str(tmp_path) for name in ("stdlib", "purelib", "platlib")}
    monkeypatch.setattr(documentation.sysconfig, "get_paths", lambda: paths)
    return tmp_path


@pytest.mark.usefixtures("library")
def test_prose_is_kept_once_and_the_rest_is_not() -> None:
    told: list[int] = []
    texts = [record["text"] for record in collect(10**6, told.append)]
    assert len(texts) == 4
    assert sum(told) == sum(map(len, texts))
    assert sorted(text.splitlines()[1:] for text in texts if "module as a whole" in text) == [
        [],
        [],
        ["The first bullet has enough words to be kept here.", "The second bullet is a paragraph of its own."],
    ]
    assert "A class of Thing with marked up words and some more of them." in texts
    assert len({record["module"] for record in collect(50, told.append)}) == 1, "it stops when there is enough"


def test_this_python_has_plenty() -> None:
    assert sum(len(record["text"]) for record in collect(200_000, lambda _: None)) >= 200_000
