"""Languages: codes (ISO 639-1) and English names."""

from __future__ import annotations

from typing import Literal

from discern.errors import ConfigError, nearest

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


SegmenterName = Literal["none", "jieba", "fugashi", "kiwipiepy", "pythainlp"]
SEGMENTERS: dict[str, SegmenterName] = {"zh": "jieba", "ja": "fugashi", "ko": "kiwipiepy", "th": "pythainlp"}
"""The word segmenter of each language that has one. The code is also the name of the extra that installs it."""


def find_language(code: str) -> str:
    """The code of a language in lower case, without the region of a tag such as "zh-CN".

    Raises:
        ConfigError: the code is unknown; the hint gives the code of the language with the nearest name.
    """
    given = code.strip().lower()
    base = given.replace("_", "-").partition("-")[0]
    if base not in LANGUAGES:
        codes = {name.lower(): each for each, name in LANGUAGES.items()}
        name = nearest(given, codes)
        hint = f"did you mean '{codes[name]}' ({name.title()})?" if name else "give an ISO 639-1 code: en, de, zh, ..."
        raise ConfigError(f"unknown language '{code}'", hint=hint)
    return base
