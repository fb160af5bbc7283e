"""Codes of languages (ISO 639-1) and their English names."""

from __future__ import annotations

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
