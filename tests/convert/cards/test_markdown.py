"""Nothing from elsewhere becomes markup in a model card."""

from __future__ import annotations

import pytest
from markupsafe import Markup

from discern.convert.cards.markdown import cell, code, escaped, quoted
from discern.convert.cards.model import language_code


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("my_model-2 (a/b)", "my_model-2 (a/b)"),
        ("_no_ *emphasis*", r"\_no\_ \*emphasis\*"),
        ("<script>&amp;", "&lt;script&gt;&amp;amp;"),
        ("[click](javascript:x) ![i](u)", r"\[click\](javascript:x) !\[i\](u)"),
        ("two\nlines\r\n\x1b[31m", r"two lines \[31m"),
        ("a\\`b`", r"a\\\`b\`"),
        ("\u202eevil", "\ufffdevil"),
        ("Größe 好", "Größe 好"),
    ],
)
def test_running_text(text: str, shown: str) -> None:
    assert escaped(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("B-LOC", "`B-LOC`"),
        ("<b>", "`<b>`"),
        ("a`b", "``a`b``"),
        ("`", "`` ` ``"),
        ("a``b```", "```` a``b``` ````"),
        ("a\n| b", "`a | b`"),
        ("", "(empty)"),
        (" \n", "(empty)"),
    ],
)
def test_code(text: str, shown: str) -> None:
    assert code(text) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("1|2", r"1\|2"),
        ("3\n## no heading", "3 ## no heading"),
        ("*a*", r"\*a\*"),
        (Markup("`a|b`"), r"`a\|b`"),
        (12, "12"),
    ],
)
def test_a_cell_stays_in_its_row(value: object, shown: str) -> None:
    assert cell(value) == shown


def test_a_quoted_card_shows_html_and_does_not_obey_it() -> None:
    card = "---\nlicense: x\n---\n# T\n</blockquote><script>x</script>\n```python\na < b\n</blockquote>\n```\n<img>\n\x1b[31m"
    assert quoted(card).splitlines() == [
        "> # T",
        "> &lt;/blockquote>&lt;script>x&lt;/script>",
        "> ```python",
        "> a < b",
        "> </blockquote>",
        "> ```",
        "> &lt;img>",
        ">  [31m",
    ]


@pytest.mark.parametrize(("language", "shown"), [("de", "de"), ("no", "'no'"), ("de\ntags:\n- evil", ""), (None, "")])
def test_a_language_is_a_code_or_nothing(language: str | None, shown: str) -> None:
    assert language_code(language) == shown
