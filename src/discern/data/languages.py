"""Languages: codes (ISO 639-1), English names, and the tokenizer that suits each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from discern.errors import ConfigError, nearest

if TYPE_CHECKING:
    from discern.data.tokenizer.choice import TokenizerChoice
    from discern.data.tokenizer.training import TokenizerKind
    from discern.data.tokenizer.words import SegmenterName

_NAMES = """
aa Afar, ab Abkhazian, ae Avestan, af Afrikaans, ak Akan, am Amharic, an Aragonese, ar Arabic, as Assamese, av Avaric, ay Aymara,
az Azerbaijani, ba Bashkir, be Belarusian, bg Bulgarian, bi Bislama, bm Bambara, bn Bengali, bo Tibetan, br Breton, bs Bosnian,
ca Catalan, ce Chechen, ch Chamorro, co Corsican, cr Cree, cs Czech, cu Church Slavic, cv Chuvash, cy Welsh, da Danish,
de German, dv Divehi, dz Dzongkha, ee Ewe, el Greek, en English, eo Esperanto, es Spanish, et Estonian, eu Basque, fa Persian,
ff Fulah, fi Finnish, fj Fijian, fo Faroese, fr French, fy Frisian, ga Irish, gd Gaelic, gl Galician, gn Guarani, gu Gujarati,
gv Manx, ha Hausa, he Hebrew, hi Hindi, ho Hiri Motu, hr Croatian, ht Haitian, hu Hungarian, hy Armenian, hz Herero,
ia Interlingua, id Indonesian, ie Interlingue, ig Igbo, ii Yi, ik Inupiaq, io Ido, is Icelandic, it Italian, iu Inuktitut,
ja Japanese, jv Javanese, ka Georgian, kg Kongo, ki Kikuyu, kj Kuanyama, kk Kazakh, kl Greenlandic, km Khmer, kn Kannada,
ko Korean, kr Kanuri, ks Kashmiri, ku Kurdish, kv Komi, kw Cornish, ky Kyrgyz, la Latin, lb Luxembourgish, lg Ganda,
li Limburgish, ln Lingala, lo Lao, lt Lithuanian, lu Luba-Katanga, lv Latvian, mg Malagasy, mh Marshallese, mi Maori,
mk Macedonian, ml Malayalam, mn Mongolian, mr Marathi, ms Malay, mt Maltese, my Burmese, na Nauru, nb Bokmal, nd North Ndebele,
ne Nepali, ng Ndonga, nl Dutch, nn Nynorsk, no Norwegian, nr South Ndebele, nv Navajo, ny Chichewa, oc Occitan, oj Ojibwa,
om Oromo, or Oriya, os Ossetian, pa Punjabi, pi Pali, pl Polish, ps Pashto, pt Portuguese, qu Quechua, rm Romansh, rn Rundi,
ro Romanian, ru Russian, rw Kinyarwanda, sa Sanskrit, sc Sardinian, sd Sindhi, se Northern Sami, sg Sango, si Sinhala, sk Slovak,
sl Slovenian, sm Samoan, sn Shona, so Somali, sq Albanian, sr Serbian, ss Swati, st Sotho, su Sundanese, sv Swedish, sw Swahili,
ta Tamil, te Telugu, tg Tajik, th Thai, ti Tigrinya, tk Turkmen, tl Tagalog, tn Tswana, to Tonga, tr Turkish, ts Tsonga, tt Tatar,
tw Twi, ty Tahitian, ug Uyghur, uk Ukrainian, ur Urdu, uz Uzbek, ve Venda, vi Vietnamese, vo Volapuk, wa Walloon, wo Wolof,
xh Xhosa, yi Yiddish, yo Yoruba, za Zhuang, zh Chinese, zu Zulu
"""
LANGUAGES = {code: name for code, _, name in (each.strip().partition(" ") for each in _NAMES.replace("\n", " ").split(","))}


def base_code(code: str) -> str:
    """The code of a language in lower case, without the region of a tag such as "zh-CN"."""
    return code.strip().lower().replace("_", "-").partition("-")[0]


def unknown_language(code: str) -> ConfigError:
    """The error of a code that does not exist; the hint names the nearest language."""
    return ConfigError(f"unknown language '{code}'", hint=_suggestion(code))


def _suggestion(code: str) -> str:
    """A hint for a language given by name or by a code of three letters, such as "chinese" or "eng"."""
    asked = code.strip().lower()
    codes = {name.lower(): each for each, name in LANGUAGES.items()}
    name = asked if asked in codes else nearest(asked, codes)
    starts = [each for each in codes if len(asked) >= 3 and each.startswith(asked)]
    found = [name] if name else starts
    if found:
        return "did you mean " + " or ".join(f"'{codes[each]}' ({LANGUAGES[codes[each]]})" for each in found[:3]) + "?"
    return "give a code of two letters (ISO 639-1): en, de, fr, es, zh, ja, ..."


# A lower-casing WordPiece also removes accents, as in BERT. That suits English and languages written with the same letters.
# Elsewhere it merges words, removes vowel signs from Hindi and Thai, and splits Hangul into its parts. Chinese has no case.
_LOWERCASED = {"en", "zh", "id", "ms", "tl", "sw"}
# Languages without spaces between words, in which a "word" of WordPiece would be a whole clause. Ideographs are split anyway.
_WITHOUT_SPACES = {"ja", "th", "lo", "km", "my", "bo", "dz"}
_DEFAULT_SIZE, _CHINESE_SIZE = 30_522, 21_128  # those of BERT


@dataclass(frozen=True)
class Language:
    """A language, and the tokenizer that suits it.

    Attributes:
        code: ISO 639-1 code, as in model cards.
        kind: kind of tokenizer to train.
        vocab_size: number of entries to train.
        lowercase: whether a trained tokenizer lower-cases.
        segmenter: word segmenter to use if it is installed.
    """

    code: str
    kind: TokenizerKind
    vocab_size: int
    lowercase: bool
    segmenter: SegmenterName

    @property
    def name(self) -> str:
        """English name of the language."""
        return LANGUAGES[self.code]

    def completed(self, choice: TokenizerChoice) -> TokenizerChoice:
        """The choice of tokenizer with the defaults of the language. A tokenizer is trained unless one is given."""
        if choice.path is not None:
            return choice
        trained = choice if choice.train is not None else replace(choice, train=self.kind)
        lowercase = self.lowercase if trained.lowercase is None else trained.lowercase
        return replace(trained, vocab_size=trained.vocab_size or self.vocab_size, lowercase=lowercase)

    def installed_segmenter(self) -> SegmenterName:
        """The segmenter, or 'none' where its package is not installed."""
        return self.segmenter if self.segmenter == "none" or find_spec(self.segmenter) is not None else "none"


def find_language(code: str) -> Language:
    """The language with this code. The region of a tag such as "zh-CN" is ignored.

    Raises:
        ConfigError: the code is unknown; the hint names the nearest language.
    """
    base = base_code(code)
    if base not in LANGUAGES:
        raise unknown_language(code)
    chinese = base == "zh"
    kind: TokenizerKind = "unigram" if base in _WITHOUT_SPACES else "wordpiece"
    return Language(base, kind, _CHINESE_SIZE if chinese else _DEFAULT_SIZE, base in _LOWERCASED, "jieba" if chinese else "none")
