"""The filter by language on sentences of several languages, on real text, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from discern.data.check import check
from discern.data.curation.filters import Rules, language
from discern.data.dataset.build import BuildOptions
from discern.data.sources.documents import Document
from discern.errors import ConfigError
from discern.progress import Silent
from tests.tasks.data_folder import data_folder

pytest.importorskip("py3langid", reason="the extra 'language' is not installed")

SENTENCES = {
    "en": "The ferry to the island leaves twice a day, in the morning and in the late afternoon.",
    "de": "Die Fähre zur Insel fährt zweimal am Tag, morgens und am späten Nachmittag.",
    "fr": "Le bac pour l'île part deux fois par jour, le matin et en fin d'après-midi.",
    "es": "El transbordador que va a la isla sale dos veces al día, por la mañana y por la tarde.",
    "ru": "Паром на остров отходит два раза в день, утром и ближе к вечеру.",
    "ja": "島へのフェリーは一日に二回、朝と夕方に出ます。",
    "zh": "去岛上的渡轮每天有两班，早上一班，下午晚些时候一班。",
}


def left_out(name: str, document: Document) -> str | None:
    """The reason why a filter leaves out a document; None if it keeps it."""
    kept, dropped = Rules([name]).apply([document])
    assert kept == ([] if dropped else [document])
    return next(iter(dropped), None)


@pytest.mark.parametrize("code", SENTENCES)
def test_one_sentence_is_identified(code: str) -> None:
    kept, _ = Rules([f"language:{code}"]).apply([[sentence] for sentence in SENTENCES.values()])
    assert kept == [[SENTENCES[code]]]


def test_the_reason_names_both_languages() -> None:
    assert left_out("language:en", [SENTENCES["de"]]) == "language: German instead of English"
    assert left_out("language:en+fr", [SENTENCES["de"]]) == "language: German instead of English or French"
    assert left_out("language:de+en", [SENTENCES["de"]]) is None
    noise = "qxzv 0x3fa9; wlkj_77 == {} -- zzqp(3432);" * 9
    assert left_out("language:en", [noise]) == "language: no language instead of English"


def test_the_confidence_that_is_asked_for() -> None:
    short = ["The house is old."]
    assert left_out("language:en:0.1", short) is None
    assert left_out("language:en:1", short) == "language: confidence in English below 1"


def test_several_languages_share_a_document_that_is_between_them() -> None:
    document = [SENTENCES["de"], SENTENCES["en"]]
    alone = [left_out(f"language:{code}:0.95", document) for code in ("de", "en")]
    assert None not in alone
    assert left_out("language:de+en:0.95", document) is None


def test_only_the_beginning_is_read() -> None:
    beginning = [SENTENCES["de"]] * 40
    assert left_out("language:de:0.9", [*beginning, *[SENTENCES["en"]] * 4000]) is None
    assert left_out("language:de:0.9", [" ".join(beginning) + SENTENCES["en"] * 4000]) is None


@pytest.mark.parametrize(
    ("name", "says", "hint"),
    [
        ("language", "needs language codes", "language:de"),
        ("language:", "needs language codes", "language:de"),
        ("language:de,en", "needs language codes", "language:de+en"),
        ("language:de:high", "needs language codes", "language:de"),
        ("language:de:1.5", "confidence of the filter language is 1.5", "at least 0.8"),
        ("language:de:0", "confidence of the filter language is 0,", "at least 0.8"),
        ("language:german", "unknown language 'german'", "'de' (German)"),
        ("language:de+qq", "unknown language 'qq'", "two letters"),
        ("language:cu", r"cannot identify Church Slavic \(cu\)", "it knows"),
    ],
)
def test_what_is_no_language_is_refused(name: str, says: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        Rules([name])
    assert hint in str(raised.value.hint)


def test_codes_of_the_same_language() -> None:
    assert left_out("language:zh-CN", [SENTENCES["zh"]]) is None
    assert left_out("language:DE", [SENTENCES["de"]]) is None
    assert left_out("language:nb", ["Fergen til øya går to ganger om dagen, om morgenen og sent på ettermiddagen."]) is None


def test_the_extra_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    language._identifier.cache_clear()
    monkeypatch.setattr(language, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed") as raised:
        Rules(["language:de"])
    assert "discern-nlp[language]" in str(raised.value.hint)


def test_a_check_counts_by_language(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(SENTENCES.values()), encoding="utf-8")
    report = check([str(tmp_path)], build=BuildOptions(workers=1, filters=("language:en+zh",)), progress=Silent())
    assert report.filtered == {
        f"language: {name} instead of English or Chinese": 1 for name in ("French", "German", "Japanese", "Russian", "Spanish")
    }


def test_real_sentences_of_two_languages() -> None:
    english = [line.split("\t")[3] for line in data_folder("glue", "CoLA", "dev.tsv").read_text("utf-8").splitlines()[:300]]
    chinese = [
        line.split("\t")[1] for line in data_folder("zh", "chnsenticorp", "dev.tsv").read_text("utf-8").splitlines()[1:301]
    ]
    kept = {
        code: [len(Rules([f"language:{code}"]).apply([[sentence] for sentence in text])[0]) for text in (english, chinese)]
        for code in ("en", "zh")
    }
    # Half of the English sentences have fewer than 36 characters; of the reviews, half have fewer than 74.
    assert kept["en"][0] > 0.9 * len(english)
    assert kept["zh"][1] > 0.99 * len(chinese)
    assert kept["en"][1] == kept["zh"][0] == 0
