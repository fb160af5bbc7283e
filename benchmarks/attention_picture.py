"""Draw the attention of a run: one head per layer, at step 0 and after training.

    python benchmarks/attention_picture.py RUN --out PNG [--text "..."] [--network discriminator] [--heads 0 1 2 3]

Each panel shows the attention of one head for one text. Each row is a token, each column a token that it attends to; dark is
high attention. The upper panels show the weights of step 0, initialized again from the run's configuration and seed, the lower
ones those of its newest checkpoint. Without --heads, layer i shows head i.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from discern.data.tokenizer import load_tokenizer, special_tokens
from discern.model_files.run import RunFolder, build_objective, load_run
from discern.models.attention import SelfAttention
from discern.objectives.base import Objective

TEXT = "the river flows through the old town and joins the sea near the harbour"


@dataclass(frozen=True)
class Row:
    """Panels for one set of weights.

    Attributes:
        title: name of the set.
        attention: attention probabilities of each layer, (heads, L, L).
    """

    title: str
    attention: Sequence[Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--network", choices=["discriminator", "generator"], default="discriminator")
    parser.add_argument("--heads", type=int, nargs="+", help="one per layer, counted from 0")
    arguments = parser.parse_args()
    run = load_run(arguments.run, warn=print)
    tokens, ids = encode(run, arguments.text)
    fresh = build_objective(run.config, run.vocabulary)
    fresh.initialize(run.config.train.seed)
    rows = [
        Row("step 0", attention(fresh, arguments.network, ids)),
        Row(f"step {run.step:,}", attention(run.objective, arguments.network, ids)),
    ]
    layers, heads = len(rows[0].attention), len(rows[0].attention[0])
    draw(rows, arguments.heads or [layer % heads for layer in range(layers)], tokens, arguments.out)
    print(f"wrote {arguments.out}")


def encode(run: RunFolder, text: str) -> tuple[list[str], Tensor]:
    """The tokens of a text between [CLS] and [SEP], and their ids, (1, L)."""
    tokenizer = load_tokenizer(run.tokenizer_path)
    special = special_tokens(tokenizer)
    ids = [special.cls, *tokenizer.encode(text, add_special_tokens=False).ids, special.sep]
    return [tokenizer.id_to_token(number) for number in ids], torch.tensor([ids])


@torch.no_grad()
def attention(objective: Objective, network: str, ids: Tensor) -> list[Tensor]:
    """Attention probabilities of each layer, (heads, L, L)."""
    found: list[Tensor] = []

    def note(part: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(part, SelfAttention)
        query, key = (
            projection(inputs[0])[0].unflatten(-1, (part.num_heads, -1)).transpose(0, 1) for projection in (part.query, part.key)
        )
        if len(inputs) > 2 and inputs[2] is not None:
            rotate = inputs[2]
            query, key = rotate(query[None])[0], rotate(key[None])[0]
        found.append((query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])).softmax(-1))

    encoder = objective.eval().networks()[network].encoder
    hooks = [part.register_forward_pre_hook(note) for part in encoder.modules() if isinstance(part, SelfAttention)]
    encoder(ids)
    for hook in hooks:
        hook.remove()
    return found


def draw(rows: Sequence[Row], heads: Sequence[int], tokens: Sequence[str], out: Path) -> None:
    """A row of panels for each set of weights, a column for each layer."""
    layers = len(rows[0].attention)
    figure = Figure(figsize=(2.6 * layers + 1.2, 2.75 * len(rows) + 0.5), layout="constrained")
    grid = figure.subplots(len(rows), layers, squeeze=False)
    for row, panels in zip(rows, grid, strict=True):
        for layer, axes in enumerate(panels):
            axes.imshow(row.attention[layer][heads[layer]], cmap="Blues", vmin=0, vmax=1)
            axes.set_title(f"{row.title}, layer {layer + 1}, head {heads[layer] + 1}", fontsize=9)
            label(axes, tokens, left=layer == 0, below=row is rows[-1])
    figure.savefig(out, dpi=130)


def label(axes: Axes, tokens: Sequence[str], *, left: bool, below: bool) -> None:
    """Label the outer edges of the grid with tokens."""
    places = range(len(tokens))
    axes.set_yticks(places, tokens if left else [""] * len(tokens), fontsize=7)
    axes.set_xticks(places, tokens if below else [""] * len(tokens), fontsize=7, rotation=90)
    axes.tick_params(length=0)
    axes.spines[:].set_linewidth(0.5)


if __name__ == "__main__":
    main()
