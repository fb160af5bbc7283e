"""Compare the speed of scorers: energies and a discriminator in one pass, against masked-LM pseudo-likelihood.

    OMP_NUM_THREADS=2 python benchmarks/scoring.py [--preset electra-small] [--tokens 20] [--sentences 200] [--repeats 5]

All scorers read the same sentences of random tokens, in float32, with networks of the same sizes: the discriminators of
objectives `electric` and `rtd`, and the encoder of `mlm`, each with untrained weights, which take the same time as trained ones.
They are timed in turns in one run. Ratios are those of the medians, printed with the fastest and the slowest repetition.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from tokenizers import Tokenizer

from discern.data.tokenizer import SPECIAL_TOKENS, bert_wordpiece, prepared, special_tokens, vocab_size
from discern.inference import scorers
from discern.inference.scoring.scorers import ScoringModel, TextScorer
from discern.model_files.run import build_objective
from discern.objectives.base import Vocabulary
from discern.training.config import load_pretrain_config

SIDES = {"electric": "electric", "rtd": "rtd", "pll": "mlm", "pll-word-l2r": "mlm"}
"""Each scorer, and the objective whose networks it uses."""
ONE_PASS = ("electric", "rtd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="electra-small")
    parser.add_argument("--vocabulary", type=int, default=30522, help="number of entries")
    parser.add_argument("--tokens", type=int, default=20, help="tokens per sentence, without [CLS] and [SEP]")
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    tokenizer = words(arguments.vocabulary)
    texts = sentences(tokenizer, arguments.sentences, arguments.tokens)
    sides = {name: scorer(name, objective, arguments.preset, tokenizer) for name, objective in SIDES.items()}
    for side in sides.values():
        assert all(len(score.tokens) == arguments.tokens for score in side.score(texts[:8]))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(arguments.repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            side.score(texts)
            seconds[name].append(time.perf_counter() - start)
    for name, times in seconds.items():
        rate = arguments.sentences / statistics.median(times)
        print(f"{name:<13} {rate:10,.1f} sentences/s  ({min(times):.3f} to {max(times):.3f} s)")
    slow = statistics.median(seconds["pll"])
    for name in ONE_PASS:
        print(f"{name} is {slow / statistics.median(seconds[name]):.1f} times as fast as pll")
    texts_read = f"{arguments.sentences:,} sentences of {arguments.tokens} tokens"
    print(f"{arguments.preset}, vocabulary {arguments.vocabulary:,}, {texts_read}, {torch.get_num_threads()} threads")


def words(entries: int) -> Tokenizer:
    """A vocabulary of made-up words, each one token."""
    listed = [*SPECIAL_TOKENS.values(), *(f"w{number}" for number in range(entries - len(SPECIAL_TOKENS)))]
    return prepared(bert_wordpiece({word: number for number, word in enumerate(listed)}, lowercase=True), "benchmark")


def sentences(tokenizer: Tokenizer, count: int, length: int) -> list[str]:
    """Return different sentences of the given length, the same in every run."""
    draw, highest = random.Random(0), vocab_size(tokenizer) - len(SPECIAL_TOKENS)
    return [" ".join(f"w{draw.randrange(highest)}" for _ in range(length)) for _ in range(count)]


def scorer(name: str, objective: str, preset: str, tokenizer: Tokenizer) -> TextScorer:
    """A scorer on untrained networks of a preset's sizes."""
    config = load_pretrain_config(None, preset, [f"objective.name={objective}"]).config
    special = special_tokens(tokenizer)
    built = build_objective(config, Vocabulary(vocab_size(tokenizer), special))
    built.initialize(0)
    method = scorers.load(name)(ScoringModel(built.eval().networks(), special))
    return TextScorer(tokenizer, config.model.max_positions, name, method)


if __name__ == "__main__":
    main()
