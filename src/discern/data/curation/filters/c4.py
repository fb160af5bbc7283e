"""The rules by which the Colossal Clean Crawled Corpus was made of web pages.

Reference: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", section 2.2.
Differs: a sentence is a line or ends with a terminal punctuation mark inside one; the list of offensive words, the choice of
language and the removal of repeated spans are left out (for the last, see --near-duplicates).
"""

from __future__ import annotations

import re

from discern.data.curation.filters import Rule, no_argument
from discern.data.sources.documents import Document

_ENDS = (".", "!", "?", '"', "”")
_SENTENCE_END = re.compile(r"[.!?]+(?=[\s\"”]|$)")
_FEWEST_WORDS, _FEWEST_SENTENCES = 5, 3
_POLICIES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


def c4(argument: str | None) -> Rule:
    """Keeps lines that are sentences, and documents of at least three of them without code or filler text."""
    no_argument("c4", argument)
    return _c4


def _c4(document: Document) -> Document | str:
    lowered = [sentence.lower() for sentence in document]
    if any("lorem ipsum" in line for line in lowered):
        return "filler text"
    if any("{" in line for line in document):
        return "a curly bracket, as in code"
    kept = [
        sentence
        for sentence, line in zip(document, lowered, strict=True)
        if sentence.endswith(_ENDS)
        and not sentence.endswith("...")
        and len(sentence.split()) >= _FEWEST_WORDS
        and "javascript" not in line
        and not any(policy in line for policy in _POLICIES)
    ]
    if sum(max(1, len(_SENTENCE_END.findall(sentence))) for sentence in kept) < _FEWEST_SENTENCES:
        return f"fewer than {_FEWEST_SENTENCES} sentences"
    return kept
