"""Draw which tokens see each other in permutation language modeling, with the masks that training uses.

    python benchmarks/permutation_picture.py --out docs/images/permutation-streams.png [--step 0]

In both panels, each row is a token, each column a token that it can see. The first columns are the memory. The number at a target
or a functional token is its place in the factorization order of its part.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from discern.corruption.permutation import blocked_pairs, factorization_order, span_targets
from discern.corruption.randomness import Randomness
from discern.types import TokenBatch

FIRST = "▁the ▁river ▁flow ing ▁past ▁the ▁old ▁mill ▁turn s ▁north ▁and".split()
A = "▁join s ▁the ▁sea".split()
B = "▁on e ▁two ▁three ▁four".split()
MEMORY, RATIO = 6, 4
CONTEXT, TARGET, FUNCTIONAL = "#4878a8", "#e08214", "#7f7f7f"


@dataclass(frozen=True)
class Example:
    """A row and its masks.

    Attributes:
        tokens: tokens of the row.
        order: (L,) the factorization order.
        targets: (L,) True for tokens that are predicted.
        functional: (L,) True for special tokens.
        visible: (L, L) True if the token of the row can see that of the column.
        part: position at which the second part begins.
    """

    tokens: list[str]
    order: Tensor
    targets: Tensor
    functional: Tensor
    visible: Tensor
    part: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--step", type=int, default=0, help="step whose targets and order are drawn")
    arguments = parser.parse_args()
    draw(example(arguments.step), arguments.out)
    print(f"wrote {arguments.out}")


def example(step: int) -> Example:
    """The masks of a row of 24 tokens."""
    tokens = [*FIRST, *A, "[SEP]", *B, "[SEP]", "[CLS]"]
    length, part = len(tokens), len(FIRST)
    functional = torch.tensor([[token in ("[SEP]", "[CLS]") for token in tokens]])
    ids = torch.arange(length)[None]
    batch = TokenBatch(
        input_ids=ids,
        attention_mask=torch.ones_like(functional),
        special_tokens_mask=functional,
        token_type_ids=torch.zeros_like(ids),
        position_ids=ids,
        document_ids=None,
        word_starts=torch.tensor([[token.startswith(("▁", "[")) for token in tokens]]),
        example_index=torch.zeros(1, dtype=torch.long),
        slot=torch.zeros(1, dtype=torch.long),
        full=True,
        reuse_length=part,
    )
    randomness = Randomness(0, step, batch.slot)
    targets = span_targets(batch, RATIO, randomness)
    order = factorization_order(length, part, None, randomness)
    visible = ~blocked_pairs(order, targets, functional, part)
    return Example(tokens, order[0], targets[0], functional[0], visible[0], part)


def draw(row: Example, out: Path) -> None:
    """Draw the mask of the content stream and, below it, that of the query stream, with a row for each target."""
    length, queries = len(row.tokens), row.targets.nonzero().flatten()
    figure = Figure(figsize=(10.5, 11.2), layout="constrained")
    content, query = figure.subplots(2, 1, height_ratios=[length, len(queries)])
    panel(content, row, row.visible | torch.eye(length, dtype=torch.bool), torch.arange(length))
    content.set_title("content stream: every token, which sees itself besides", fontsize=11, loc="left")
    panel(query, row, row.visible[queries], queries)
    query.set_title("query stream: the targets only, each from its place without its word", fontsize=11, loc="left")
    label_columns(content, row, above=True)
    figure.legend(
        handles=[
            Patch(color=CONTEXT, label="sees context"),
            Patch(color=TARGET, label="sees a target"),
            Patch(color=FUNCTIONAL, label="sees a functional token"),
            Patch(color="#a6cee3", label="sees the memory"),
            Patch(facecolor="white", edgecolor="black", label="does not see"),
        ],
        loc="outside lower center",
        ncols=5,
        fontsize=9,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


def panel(axes: Axes, row: Example, sees: Tensor, lookers: Tensor) -> None:
    """Draw one mask, with the memory first; the color is the class of the visible token."""
    kind = torch.where(row.targets, 2, torch.where(row.functional, 3, 1))
    cells = np.concatenate([np.full((len(lookers), MEMORY), 4), (sees * kind).numpy()], 1)
    axes.imshow(cells, cmap=ListedColormap(["white", CONTEXT, TARGET, FUNCTIONAL, "#a6cee3"]), vmin=0, vmax=4, aspect="auto")
    axes.set_yticks(range(len(lookers)), [named(row, int(place)) for place in lookers], fontsize=8)
    for label, place in zip(axes.get_yticklabels(), lookers.tolist(), strict=True):
        label.set_color(color(row, place))
    axes.set_xticks([])
    axes.set_xticks(np.arange(cells.shape[1] + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(lookers) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="#cccccc", linewidth=0.5)
    axes.tick_params(which="both", length=0)
    for edge in (MEMORY, MEMORY + row.part):
        axes.axvline(edge - 0.5, color="black", linewidth=1.6)
    below = int((lookers < row.part).sum())
    axes.axhline(below - 0.5, color="black", linewidth=1.6)


def label_columns(axes: Axes, row: Example, *, above: bool) -> None:
    """Label the columns with their tokens and parts."""
    places = range(len(row.tokens))
    axes.set_xticks([MEMORY + place for place in places], [named(row, place) for place in places], rotation=90, fontsize=8)
    axes.tick_params(axis="x", labeltop=above, labelbottom=not above)
    for label, place in zip(axes.get_xticklabels(), places, strict=True):
        label.set_color(color(row, place))
    parts = (("memory", 0, MEMORY), ("first part: text", MEMORY, row.part), ("second part", MEMORY + row.part, len(FIRST)))
    for name, start, width in parts:
        axes.text(start + width / 2 - 0.5, len(row.tokens) - 0.2, name, ha="center", va="top", fontsize=9)


def named(row: Example, place: int) -> str:
    """A token, with its place in the order if it has one."""
    ranked = bool(row.targets[place] | row.functional[place])
    return f"{row.tokens[place]}  {int(row.order[place])}" if ranked else row.tokens[place]


def color(row: Example, place: int) -> str:
    """The color of a token's class."""
    return TARGET if row.targets[place] else FUNCTIONAL if row.functional[place] else CONTEXT


if __name__ == "__main__":
    main()
