"""Make real sentences with wrong words of three kinds, to evaluate a detector.

    python benchmarks/detection.py TEXT --model MODEL --out wrong.jsonl [--sentences 500] [--seed 0]
    discern detect MODEL --evaluate wrong.jsonl --json

TEXT is plain text or WikiExtractor's `<doc>` files, with sentences that the model was not trained on. Each sentence gets

- `random`: a word replaced by a random word of the text, all words that occur at least five times being equally likely;
- `generator`: a word replaced by a different one that the generator of MODEL sampled, given the rest of the original sentence;
- `hand`: a word replaced by one that people confuse it with, from the table below,

at three places that are not adjacent. Sentences without a word of the table are left out. Each line of the output has the text
and, for each wrong word, its position, its kind and the original word.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from discern.data.tokenizer import TokenTexts, special_tokens
from discern.inference.detection import Detector, generator_logits, load_detector

CONFUSIONS = """
accept/except advice/advise affect/effect allusion/illusion are/our beside/besides board/bored brake/break buy/by
capital/capitol choose/chose cite/site complement/compliment council/counsel desert/dessert device/devise do/due
elicit/illicit emigrate/immigrate ensure/insure fair/fare farther/father find/fined for/four form/from found/fond
hear/here heard/herd hole/whole hour/our its/it's knew/new know/now later/latter lead/led lessen/lesson lose/loose
made/maid main/mane meat/meet miner/minor moral/morale one/won or/ore passed/past patience/patients peace/piece
personal/personnel plain/plane pole/poll presence/presents principal/principle quiet/quite rain/reign raise/rise read/red
right/write road/rode role/roll sail/sale scene/seen sea/see serial/cereal sole/soul some/sum son/sun stationary/stationery
steal/steel than/then their/there there/they're thorough/through threw/through to/too trial/trail two/to vary/very
wait/weight war/wore was/saw waste/waist way/weigh weak/week weather/whether were/where which/witch who's/whose
wood/would world/word your/you're
"""
SHORTEST, LONGEST = 8, 40  # words
FEWEST_OCCURRENCES = 5
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"“(]?[A-Z])")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--model", required=True, type=Path, help="a run, or an export with its generator")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--sentences", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found = [sentence for path in arguments.text for sentence in sentences(path.read_text(encoding="utf-8"))]
    model = load_detector(arguments.model, print, with_generator=True)
    written = 0
    with arguments.out.open("w", encoding="utf-8") as out:
        for record in spoiled(found, model, random.Random(arguments.seed)):
            out.write(json.dumps(record, ensure_ascii=False) + "\n")
            written += 1
            if written == arguments.sentences:
                break
    print(f"{arguments.out}: {written:,} sentences with three wrong words each, of {len(found):,} in the text")


def sentences(text: str) -> Iterator[str]:
    """Return the sentences of 8 to 40 words with a final punctuation mark."""
    for line in text.splitlines():
        if line.startswith("<"):
            continue
        for sentence in _SENTENCE_END.split(line.strip()):
            if sentence.endswith((".", "!", "?")) and SHORTEST <= len(_WORD.findall(sentence)) <= LONGEST:
                yield sentence


def spoiled(found: Sequence[str], model: Detector, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield sentences in random order, each with its three wrong words."""
    counts = Counter(word.lower() for sentence in found for word in _WORD.findall(sentence))
    common = sorted(word for word, count in counts.items() if count >= FEWEST_OCCURRENCES)
    table = confusions()
    whole_words = words_of_one_token(model)
    for sentence in rng.sample(list(found), len(found)):
        words = list(_WORD.finditer(sentence))
        confusable = [place for place, word in enumerate(words) if word.group().lower() in table]
        if not confusable or not common:
            continue
        hand = rng.choice(confusable)
        places = [place for place in range(len(words)) if abs(place - hand) > 1]
        first = rng.choice(places)
        others = [place for place in places if abs(place - first) > 1]
        if not others:
            continue
        second = rng.choice(others)
        told = from_generator(sentence, words[second], model, whole_words, rng)
        drawn = rng.choice([word for word in common if word != words[first].group().lower()] or [""])
        if told is None or not drawn:
            continue
        wrong = {
            hand: ("hand", rng.choice(table[words[hand].group().lower()])),
            first: ("random", drawn),
            second: ("generator", told),
        }
        yield put_in(sentence, words, wrong)


def put_in(sentence: str, words: Sequence[re.Match[str]], wrong: dict[int, tuple[str, str]]) -> dict[str, Any]:
    """Return the sentence with words exchanged, and their positions in it."""
    text, done, spans = "", 0, []
    for place in sorted(wrong):
        kind, word = wrong[place]
        original = words[place]
        text += sentence[done : original.start()]
        put = like(word, original.group())
        spans.append({"start": len(text), "end": len(text) + len(put), "kind": kind, "original": original.group()})
        text, done = text + put, original.end()
    return {"text": text + sentence[done:], "wrong": spans}


def like(word: str, original: str) -> str:
    """Return the word, capitalized if the original is."""
    return word[:1].upper() + word[1:] if original[:1].isupper() else word


def confusions() -> dict[str, list[str]]:
    """Return the words that each word of the table is confused with."""
    table: dict[str, list[str]] = {}
    for pair in CONFUSIONS.split():
        one, other = pair.split("/")
        table.setdefault(one, []).append(other)
        table.setdefault(other, []).append(one)
    return table


def words_of_one_token(model: Detector) -> dict[int, str]:
    """Return the tokens that are whole words, with their ids."""
    tokenizer = model.tokenizer
    texts = TokenTexts(tokenizer)
    named = {number: texts.shown(number) for number in tokenizer.get_vocab().values()}
    return {
        number: word
        for number, word in sorted(named.items())
        if _WORD.fullmatch(word) and tokenizer.encode(word, add_special_tokens=False).ids == [number]
    }


@torch.inference_mode()
def from_generator(
    sentence: str, word: re.Match[str], model: Detector, whole_words: dict[int, str], rng: random.Random
) -> str | None:
    """Return a replacement sampled from the generator; None if the word has several tokens or no sample is suitable."""
    assert model.generator is not None, "the model came without a generator"
    tokenizer = model.tokenizer
    encoding = tokenizer.encode(sentence, add_special_tokens=False)
    tokens = [n for n, (start, end) in enumerate(encoding.offsets) if start < word.end() and word.start() < end]
    if len(tokens) != 1 or len(encoding) > model.window_size:
        return None
    special = special_tokens(tokenizer)
    row = torch.tensor([[special.cls, *encoding.ids, special.sep]])
    places = torch.zeros_like(row, dtype=torch.bool)
    places[0, tokens[0] + 1] = True
    logits = generator_logits(model.generator, special, row, places)
    allowed = [number for number, each in whole_words.items() if each.lower() != word.group().lower()]
    if not allowed:
        return None
    weights = logits[0, allowed].double().softmax(0).tolist()
    return whole_words[rng.choices(allowed, weights)[0]]


if __name__ == "__main__":
    main()
