"""Filters: rules that leave out documents, or lines of them.

A filter is registered as a function that takes the argument of the filter, which follows a colon in its name (`words:20`) and is
None without one, and returns a rule. A rule takes a document and returns it, possibly with fewer lines, or the reason why it is
left out. Other packages register filters under the entry point group `discern.filters`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from discern.data.languages import LANGUAGES, find_language
from discern.data.sources.documents import Document
from discern.errors import ConfigError, DataError
from discern.registry import Registry

Rule = Callable[[Document], Document | str]

_LANGUAGE_NAMES = LANGUAGES | {"zxx": "no language"}


class Rules:
    """Several filters, applied one after the other.

    Args:
        names: names of the filters, each with its argument, such as `words:20`.

    Raises:
        ConfigError: there is no filter of a name, or an argument is of another form.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._rules: list[tuple[str, Rule]] = []
        for name in names:
            kind, _, argument = name.partition(":")
            self._rules.append((kind, filters.load(kind)(argument or None)))

    def apply(self, documents: Iterable[Document]) -> tuple[list[Document | None], Counter[str]]:
        """The documents, with None in the places of those left out, and the number left out by filter and reason."""
        results, dropped = list[Document | None](), Counter[str]()
        for document in documents:
            for name, rule in self._rules:
                result = rule(document)
                if isinstance(result, str):
                    dropped[f"{name}: {result}"] += 1
                    results.append(None)
                    break
                document = result
            else:
                results.append(document)
        return results, dropped


def all_left_out(filtered: Mapping[str, int]) -> DataError:
    """The error that no document is left.

    Args:
        filtered: number of documents that were left out, by filter and reason.
    """
    reasons = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(filtered.items()))
    return DataError(f"the filters leave out every document ({reasons})", hint="leave out a --filter, or relax it")


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """Versions of the packages that the results of filters depend on."""
    return {"py3langid": version("py3langid")} if any(name.startswith("language:") for name in names) else {}


def words(argument: str | None) -> Rule:
    """Keeps documents by their number of words, separated by spaces: `words:20` at least 20, `words:20-5000` also at most 5000.

    Raises:
        ConfigError: the argument is of another form.
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", argument or "")
    if match is None:
        raise ConfigError(f"the filter words needs a number of words, but '{argument or ''}' is given", hint="--filter words:20")
    least, most = int(match[1]), float(match[2] or "inf")

    def rule(document: Document) -> Document | str:
        count = sum(len(sentence.split()) for sentence in document)
        if count < least:
            return f"fewer than {least:,} words"
        return f"more than {most:,.0f} words" if count > most else document

    return rule


def language(argument: str | None) -> Rule:
    """Keeps documents in some languages: `language:de`, `language:de+en` either of two, `language:de:0.8` with a confidence of
    at least 0.8 instead of 0.5.

    The confidence is the sum of the probabilities of the requested languages, given the first 1,000 characters, by the identifier
    `py3langid`: naive Bayes over runs of bytes.

    Reference: Lui and Baldwin 2012, "langid.py: An Off-the-shelf Language Identification Tool".

    Raises:
        ConfigError: the argument is of another form, a language is unknown, or the extra `language` is not installed.
    """
    match = re.fullmatch(r"([\w-]+(?:\+[\w-]+)*)(?::(0?\.\d*[1-9]\d*|1|1\.0+))?", argument or "")
    if match is None:
        raise ConfigError(
            f"the filter language needs language codes and a confidence of at most 1, but '{argument or ''}' is given",
            hint="--filter language:de, or --filter language:de+en:0.8 for two languages and a confidence of at least 0.8",
        )
    least = float(match[2] or 0.5)
    identifier = _language_identifier()
    codes = []
    for given in match[1].split("+"):
        code = given.lower().partition("-")[0]
        code = "no" if code == "nb" else code  # the identifier has one code for both, and nn for Nynorsk
        if code not in identifier.labels:
            raise ConfigError(
                f"the filter language cannot identify {LANGUAGES[find_language(given)]} ({code})",
                hint=f"it knows {len(identifier.labels)} languages: {' '.join(sorted(identifier.labels))}",
            )
        codes.append(code)
    names = " or ".join(_LANGUAGE_NAMES.get(code, code) for code in codes)

    def rule(document: Document) -> Document | str:
        ranked = identifier.rank(_beginning(document))
        if sum(probability for code, probability in ranked if code in codes) >= least:
            return document
        likeliest, probability = ranked[0]
        if likeliest in codes or probability < least:
            return f"confidence in {names} below {least:g}"
        return f"{_LANGUAGE_NAMES.get(likeliest, likeliest)} instead of {names}"

    return rule


def language_of(document: Document) -> str | None:
    """The likeliest language of a document; None if the extra `language` is not installed."""
    if find_spec("py3langid") is None:
        return None
    return str(_language_identifier().rank(_beginning(document))[0][0])


def _beginning(document: Document) -> str:
    # A paragraph. More takes longer and decides nothing: of 400 articles, the same 377 are found to be English by 500 and by
    # 4,000 characters.
    return "\n".join(document)[:1000].rstrip("\n")


@lru_cache(maxsize=1)
def _language_identifier() -> Any:
    """The identifier of this process."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as problem:
        raise ConfigError(
            "the filter language needs the package py3langid, which is not installed", hint="pip install 'discern-nlp[language]'"
        ) from problem
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def gopher_quality(document: Document) -> Document | str:
    """Keeps documents that look like English prose: number and length of words, symbols, bullets, ellipses and stop words.

    Reference: Rae et al. 2021, "Scaling Language Models: Methods, Analysis & Insights from Training Gopher", appendix A.1.1.
    """
    words = " ".join(document).split()
    if not 50 <= len(words) <= 100_000:
        return "not 50 to 100,000 words"
    if not 3 <= sum(map(len, words)) / len(words) <= 10:
        return "mean length of words not 3 to 10 characters"
    if sum(sentence.count(symbol) for sentence in document for symbol in ("#", "...", "…")) > 0.1 * len(words):
        return "more than 0.1 hash signs and ellipses per word"
    if sum(sentence.startswith(("•", "‣", "-", "*")) for sentence in document) > 0.9 * len(document):
        return "more than 90% of the lines begin with a bullet"
    if sum(sentence.endswith(("...", "…")) for sentence in document) > 0.3 * len(document):
        return "more than 30% of the lines end with an ellipsis"
    if sum(any(map(str.isalpha, word)) for word in words) < 0.8 * len(words):
        return "fewer than 80% of the words have a letter"
    if len({"the", "be", "to", "of", "and", "that", "have", "with"} & {word.lower() for word in words}) < 2:
        return "fewer than two English stop words"
    return document


def gopher_repetition(document: Document) -> Document | str:
    """Keeps documents that do not repeat themselves: lines, the most frequent n-gram, and all n-grams that occur twice.

    Reference: Rae et al. 2021, table A1.
    Differs: documents have lines and no paragraphs, so the two rules on repeated paragraphs are left out.
    """
    distinct = set(document)
    if len(document) - len(distinct) > 0.3 * len(document):
        return "more than 30% of the lines are repeated"
    characters = sum(map(len, document))
    if characters - sum(map(len, distinct)) > 0.2 * characters:
        return "more than 20% of the characters are in repeated lines"
    words = " ".join(document).split()
    total = sum(map(len, words))
    for size, most in {2: 0.2, 3: 0.18, 4: 0.16}.items():
        counts = Counter(_ngrams(words, size))
        # Of n-grams of the same number, the longest: the result must not depend on their order.
        count, length = max(((count, sum(map(len, ngram))) for ngram, count in counts.items()), default=(0, 0))
        if count > 1 and count * length > most * total:
            return f"more than {most:.0%} of the characters are in one {size}-gram"
    for size, most in {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.1}.items():
        seen, repeated, end = set(), 0, 0
        for begin, ngram in enumerate(_ngrams(words, size)):
            if ngram in seen:  # a word in several repeated n-grams counts once
                repeated += sum(map(len, words[max(begin, end) : begin + size]))
                end = begin + size
            seen.add(ngram)
        if repeated > most * total:
            return f"more than {most:.0%} of the characters are in repeated {size}-grams"
    return document


def _ngrams(words: list[str], size: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[first:] for first in range(size)), strict=False)


def c4(document: Document) -> Document | str:
    """Keeps lines that are sentences, and documents of at least three of them without code or filler text.

    Reference: Raffel et al. 2020, "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", section
    2.2, on the Colossal Clean Crawled Corpus.
    Differs: a sentence is a line or ends with a terminal punctuation mark inside one; the list of offensive words, the choice of
    language and the removal of repeated spans are left out (for the last, see --near-duplicates).
    """
    text = "\n".join(document)
    if "lorem ipsum" in text.lower():
        return "filler text"
    if "{" in text:
        return "a curly bracket, as in code"
    kept = [
        line
        for line in document
        if line.endswith((".", "!", "?", '"', "”"))
        and not line.endswith("...")
        and len(line.split()) >= 5
        and not re.search("javascript|terms of use|(privacy|cookie) policy|uses? cookies|use of cookies", line.lower())
    ]
    if sum(max(1, len(re.findall(r"[.!?]+(?=[\s\"”]|$)", line))) for line in kept) < 3:
        return "fewer than 3 sentences"
    return kept


def _fixed(rule: Rule, argument: str | None) -> Rule:
    """A rule without settings."""
    if argument is not None:
        raise ConfigError(f"the filter takes no argument, but '{argument}' is given", hint=f"leave out ':{argument}'")
    return rule


BUILT_IN: dict[str, Any] = {
    "words": words,
    "language": language,
    "gopher-quality": partial(_fixed, gopher_quality),
    "gopher-repetition": partial(_fixed, gopher_repetition),
    "c4": partial(_fixed, c4),
}
filters: Registry[Any] = Registry("filter", "discern.filters")
for _name in BUILT_IN:
    filters.register(_name, f"{__name__}:BUILT_IN")
