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
LANGUAGES: dict[str, str] = dict(entry.strip().split(" ", 1) for entry in _NAMES.split(","))


def base_code(code: str) -> str:
    """The code of a language in lower case, without the region of a tag such as "zh-CN"."""
    return code.strip().lower().replace("_", "-").partition("-")[0]


def unknown_language(code: str) -> ConfigError:
    """The error of a code that does not exist; the hint gives the code of the language with the nearest name."""
    codes = {name.lower(): each for each, name in LANGUAGES.items()}
    name = nearest(code.strip().lower(), codes)
    hint = (
        f"did you mean '{codes[name]}' ({name.title()})?" if name else "give a code of two letters (ISO 639-1): en, de, zh, ..."
    )
    return ConfigError(f"unknown language '{code}'", hint=hint)


# A lower-casing WordPiece also removes accents, as in BERT. That suits English and languages written with the same letters.
# Elsewhere it merges words, removes vowel signs from Hindi and Thai, and splits Hangul into its parts. Chinese has no case.
_LOWERCASED = {"en", "zh", "id", "ms", "tl", "sw"}
# Languages without spaces between words, in which a "word" of WordPiece would be a whole clause. Ideographs are split anyway.
_WITHOUT_SPACES = {"ja", "th", "lo", "km", "my", "bo", "dz"}
_DEFAULT_SIZE, _CHINESE_SIZE = 30_522, 21_128  # those of BERT
SEGMENTERS: dict[SegmenterName, str] = {"jieba": "zh", "fugashi": "ja", "kiwipiepy": "ko", "pythainlp": "th"}
"""The language that each word segmenter is for, whose code is also the name of the extra that installs it."""


@dataclass(frozen=True)
class Language:
    """A language, and the tokenizer that suits it.

    Attributes:
        code: ISO 639-1 code, as in model cards.
    """

    code: str

    @property
    def name(self) -> str:
        """English name of the language."""
        return LANGUAGES[self.code]

    @property
    def segmenter(self) -> SegmenterName:
        """Word segmenter to use if it is installed."""
        return next((name for name, code in SEGMENTERS.items() if code == self.code), "none")

    def installed_segmenter(self) -> SegmenterName:
        """The segmenter, or 'none' where its package is not installed."""
        return self.segmenter if find_spec(self.segmenter) is not None else "none"

    def completed(self, choice: TokenizerChoice) -> TokenizerChoice:
        """The choice of tokenizer with the defaults of the language. A tokenizer is trained unless one is given."""
        if choice.path is not None:
            return choice
        kind: TokenizerKind = "unigram" if self.code in _WITHOUT_SPACES else "wordpiece"
        size = _CHINESE_SIZE if self.code == "zh" else _DEFAULT_SIZE
        lowercase = self.code in _LOWERCASED if choice.lowercase is None else choice.lowercase
        return replace(choice, train=choice.train or kind, vocab_size=choice.vocab_size or size, lowercase=lowercase)


def find_language(code: str) -> Language:
    """The language with this code. The region of a tag such as "zh-CN" is ignored.

    Raises:
        ConfigError: the code is unknown; the hint names the nearest language.
    """
    language = Language(base_code(code))
    if language.code not in LANGUAGES:
        raise unknown_language(code)
    return language
