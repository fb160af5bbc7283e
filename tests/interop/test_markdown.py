"""Nothing from elsewhere becomes markup in a model card."""

from __future__ import annotations

import pytest

from discern.interop.markdown import code, escaped, markdown_table, quoted
from discern.interop.model_card import language_line


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


def test_a_cell_stays_in_its_row() -> None:
    assert markdown_table(("a", "b"), [("1|2", "3\n## no heading")]) == "| a | b |\n| --- | --- |\n| 1\\|2 | 3 ## no heading |"


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


def test_a_language_is_a_code_or_nothing() -> None:
    assert language_line("de") == "language: de\n"
    assert language_line("no") == "language: 'no'\n"
    assert language_line("de\ntags:\n- evil") == ""
