"""The energies at which Electric's loss is least, by enumerating every text, every choice of noise and every sample."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def chain(places: int, words: int, seed: int = 0) -> Floats:
    """The probability of every text of a random chain: (words,) * places."""
    rng = np.random.default_rng(seed)
    joint = np.ones((words,) * places)
    for place in range(places - 1):
        shape = [1] * places
        shape[place : place + 2] = words, words
        joint = joint * np.exp(0.8 * rng.standard_normal((words, words))).reshape(shape)
    return joint / joint.sum()


def conditionals(joint: Floats) -> Floats:
    """The probability of the word at each place given all others, of every text: (places, texts)."""
    return np.stack([(joint / joint.sum(place, keepdims=True)).ravel() for place in range(joint.ndim)])


def frequencies(joint: Floats) -> Floats:
    """The probability of the word at each place whatever stands at the others, likewise."""
    axes = range(joint.ndim)
    return np.stack([(joint * 0 + joint.sum(tuple(set(axes) - {place}), keepdims=True)).ravel() for place in axes])


def gap(joint: Floats, q: Floats, noise_tokens: int, *, clean: bool = False) -> float:
    """How far the best energy is from -log p(word | others), in nats: the mean of the absolute difference over all texts, by
    their probability, and all places.

    Args:
        q: the noise distribution, as `conditionals` gives them.
        noise_tokens: places of a text that become noise, all drawn at once given the clean text.
        clean: the logit holds q given the clean text, as in the released code; else given the noised one, as here.
    """
    places, words = joint.ndim, joint.shape[0]
    texts = np.array(list(product(range(words), repeat=places)))
    weights = words ** np.arange(places)[::-1]
    drawn = np.array(list(product(range(words), repeat=noise_tokens)))
    # (texts, ways) per place: probability of a clean text with the noised one, log q that stands in the logit, is it noise.
    ways: list[list[tuple[Floats, Floats, bool]]] = [[] for _ in range(places)]
    for chosen in combinations(range(places), noise_tokens):
        original = np.repeat(texts[:, None], len(drawn), axis=1)
        original[:, :, list(chosen)] = drawn
        probability = joint.ravel()[original @ weights]
        for place in chosen:
            probability = probability * q[place][with_word(original, texts, place) @ weights]
        for place in range(places):
            of_text = np.repeat((texts @ weights)[:, None], len(drawn), axis=1)
            seen = with_word(original, texts, place) @ weights if clean else of_text
            ways[place].append((probability, np.log(q[place][seen]), place in chosen))
    odds = np.log(noise_tokens / (places - noise_tokens))
    energies = np.stack([least(each, odds) for each in ways])
    return float((np.abs(energies + np.log(conditionals(joint))) * joint.ravel()).sum(1).mean())


def with_word(original: NDArray[np.int64], texts: NDArray[np.int64], place: int) -> NDArray[np.int64]:
    """The clean texts with the noised text's word at one place."""
    changed = original.copy()
    changed[:, :, place] = texts[:, None, place]
    return changed


def least(ways: list[tuple[Floats, Floats, bool]], odds: float) -> Floats:
    """The energy of each text at which the expected cross-entropy has no slope, by bisection: (texts,)."""
    probability, log_q = (np.concatenate([way[item] for way in ways], axis=1) for item in (0, 1))
    is_noise = np.concatenate([np.full(way[0].shape[1], float(way[2])) for way in ways])
    low, high = np.full(len(log_q), -30.0), np.full(len(log_q), 30.0)
    for _ in range(50):
        middle = (low + high) / 2
        said = 1 / (1 + np.exp(-(middle[:, None] + log_q + odds)))
        rises = (probability * (said - is_noise)).sum(1) > 0
        low, high = np.where(rises, low, middle), np.where(rises, middle, high)
    return (low + high) / 2
