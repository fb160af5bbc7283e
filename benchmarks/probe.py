"""Probe the states of encoders, layer by layer, with linear classifiers of tags.

    python benchmarks/probe.py MODEL ... --train train.txt --dev dev.txt [--tag-column -1] [--sentences 2000] [--json OUT.json]

Files have one word per line, with its tag in a column, as in CoNLL-2000. Of each network of each MODEL (a run, an export or
an import), the states of the first pieces of all words are standardized and given to a logistic regression; nothing in the
network is trained. Layer 0 is the word embeddings, which know nothing of the context. Prints the accuracy on the words of
the dev file as Markdown.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tokenizers import Tokenizer
from torch import Tensor

from discern.data.tokenizer import special_tokens
from discern.model_files.folder import open_model
from discern.models.base import Encoder
from discern.tasks.base import TaggingExample
from discern.tasks.readers.conll import read_conll


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--train", required=True, type=Path)
    parser.add_argument("--dev", required=True, type=Path)
    parser.add_argument("--tag-column", type=int, default=-1)
    parser.add_argument("--sentences", type=int, default=2000, help="sentences of the training file to use")
    parser.add_argument("--json", type=Path, help="file for the accuracies")
    request = parser.parse_args()
    train = read_conll(request.train, tag_column=request.tag_column).examples[: request.sentences]
    dev = read_conll(request.dev, tag_column=request.tag_column).examples
    found: dict[str, list[float]] = {}
    for model in request.models:
        folder = open_model(model, warn=print)
        for name, network in folder.networks(beside=False).items():
            row = f"{model.name} {name}"
            found[row] = probe(network.encoder, folder.tokenizer, train, dev)
            print(row, found[row], flush=True)
    depth = max(map(len, found.values()))
    print("\n| network | " + " | ".join(f"layer {layer}" for layer in range(depth)) + " |\n" + "|---" * (depth + 1) + "|")
    for name, accuracies in found.items():
        print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in accuracies) + " |" * (1 + depth - len(accuracies)))
    if request.json:
        request.json.write_text(json.dumps(found, indent=1) + "\n")


def probe(encoder: Encoder, tokenizer: Tokenizer, train: Sequence[TaggingExample], dev: Sequence[TaggingExample]) -> list[float]:
    """Accuracy of a linear classifier on the states after each layer, embeddings first."""
    layers, tags = states_of(encoder, tokenizer, train)
    dev_layers, dev_tags = states_of(encoder, tokenizer, dev)
    accuracies = []
    for states, dev_states in zip(layers, dev_layers, strict=True):
        classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=200))
        accuracies.append(float(classifier.fit(states, tags).score(dev_states, dev_tags)))
    return accuracies


@torch.inference_mode()
def states_of(encoder: Encoder, tokenizer: Tokenizer, examples: Sequence[TaggingExample]) -> tuple[list[np.ndarray], list[str]]:
    """The states of the first pieces of all words, an array (W, D) for each layer, and the words' tags."""
    special = special_tokens(tokenizer)
    rows = []
    for example in examples:
        encodings = tokenizer.encode_batch(list(example.words), add_special_tokens=False)
        pieces = [encoding.ids or [special.unk] for encoding in encodings]
        starts = np.cumsum([1, *map(len, pieces[:-1])])
        rows.append(([special.cls, *(piece for word in pieces for piece in word), special.sep], starts, example.tags or ()))
    seen: list[list[Tensor]] = [[] for _ in range(len(encoder.repeated_blocks()) + 1)]
    tags: list[str] = []
    current: list[Tensor] = []
    with ExitStack() as stack:
        for block in encoder.repeated_blocks()[:-1]:
            handle = block.register_forward_hook(lambda _module, _inputs, output: current.append(first_tensor(output)))
            stack.callback(handle.remove)
        rows.sort(key=lambda row: len(row[0]))
        for _, group in groupby(rows, key=lambda row: len(row[0])):
            batch = list(group)  # rows of one length: nothing is padded
            ids = torch.tensor([row[0] for row in batch])
            current.clear()
            last = encoder(ids)
            for layer, states in zip(seen, [encoder.embeddings.words(ids), *current, last], strict=True):
                states = states.reshape(*ids.shape, -1)
                layer.extend(states[place, torch.from_numpy(row[1])] for place, row in enumerate(batch))
            tags += [tag for row in batch for tag in row[2]]
    return [torch.cat(layer).float().numpy() for layer in seen], tags


def first_tensor(output: Any) -> Tensor:
    """The hidden states of what a block returns: a tensor, or a tuple that begins with it."""
    return output if isinstance(output, Tensor) else first_tensor(output[0])


if __name__ == "__main__":
    main()
