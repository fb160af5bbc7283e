"""An outsider to compare with at equal processor time: LTG-BERT under masked language modeling, in plain PyTorch.

    OMP_NUM_THREADS=1 python benchmarks/ltg_bert.py --data DATA --sentences FILE --seconds 600 [--rate 2e-3] [--json OUT.json]

DATA is a data set that `discern prepare` wrote. The network follows Samuel et al. 2023, "Trained on 100 million words and still
in shape": attention with norms before and after it, gated feed-forward layers with a norm inside, disentangled attention with
relative positions in logarithmic buckets, and initial weights that shrink with depth. Its sizes, vocabulary and text are those of
the preset `modern-cpu`. It trains for SECONDS of processor time with AdamW under a cosine; 15 % of the tokens are chosen, and
80 % of those are masked and 10 % replaced. Afterwards each line of FILE is scored as by `discern score --scorer pll`: every token
is masked in turn. Prints a JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from discern.data.dataset.shards import TokenData

LAYERS, WIDTH, HEADS, INNER = 4, 192, 6, 304
BUCKETS, LONGEST = 32, 512  # distances below half the buckets have one each
CHOSEN, MASKED, REPLACED = 0.15, 0.8, 0.1
WARM_UP = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--sentences", required=True, type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the result")
    request = parser.parse_args()
    torch.manual_seed(request.seed)
    data = TokenData.open(request.data)
    special = data.special_tokens
    network = Network(data.vocab_size)
    found = train(network, data, request)
    tokenizer = data.tokenizer()
    lines = [line for line in request.sentences.read_text().splitlines() if line.strip()]
    rows = [[special.cls, *tokenizer.encode(line, add_special_tokens=False).ids, special.sep] for line in lines]
    total = sum(pseudo_log_likelihood(network, row, special.mask) for row in rows)
    found |= {"mean_pll": total / len(lines), "score_per_character": total / sum(map(len, lines))}
    print(json.dumps(found))
    if request.json:
        request.json.write_text(json.dumps(found, indent=1) + "\n")


class Network(nn.Module):
    """LTG-BERT with a head that predicts words."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, WIDTH)
        self.embedding_norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.distances = nn.Parameter(torch.empty(2 * BUCKETS - 1, WIDTH))
        self.distance_norm = nn.LayerNorm(WIDTH)
        self.attentions = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.feedforwards = nn.ModuleList(FeedForward() for _ in range(LAYERS))
        self.head = nn.Sequential(
            nn.LayerNorm(WIDTH, elementwise_affine=False),
            nn.Linear(WIDTH, WIDTH),
            nn.GELU(),
            nn.LayerNorm(WIDTH, elementwise_affine=False),
        )
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        spread = math.sqrt(2 / (5 * WIDTH))
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                layer = int(name.split(".")[1]) if name.startswith("feedforwards") else None
                nn.init.trunc_normal_(weight, std=spread if layer is None else spread * math.sqrt(1 / (2 * (1 + layer))))
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, ids: Tensor) -> Tensor:
        """States (B, L, WIDTH) of ids (B, L)."""
        hidden: Tensor = self.embedding_norm(self.words(ids))
        relative, places = self.distance_norm(self.distances), buckets(ids.shape[1])
        for attention, feedforward in zip(self.attentions, self.feedforwards, strict=True):
            hidden = hidden + attention(hidden, relative, places)
            hidden = hidden + feedforward(hidden)
        return hidden

    def logits(self, states: Tensor) -> Tensor:
        """Logits of the words, given states at the positions to predict."""
        found: Tensor = F.linear(self.head(states), self.words.weight, self.bias)
        return found


class Attention(nn.Module):
    """Attention by content to content, content to distance and distance to content."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.LayerNorm(WIDTH)
        self.query_key, self.value, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, relative: Tensor, places: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        hidden = self.before(hidden)
        query, key = self.query_key(hidden).view(batch, length, 2, HEADS, -1).permute(2, 0, 3, 1, 4)
        value = self.value(hidden).view(batch, length, HEADS, -1).transpose(1, 2)
        far_query, far_key = self.query_key(relative).view(len(relative), 2, HEADS, -1).permute(1, 2, 3, 0)  # (HEADS, d, R)
        scale = 1 / math.sqrt(3 * query.shape[-1])
        scores = query @ key.transpose(-1, -2)
        index = places.expand(batch, HEADS, -1, -1)
        scores = scores + (query @ far_key).gather(-1, index)
        scores = scores + (key @ far_query).gather(-1, index.transpose(-1, -2)).transpose(-1, -2)
        mixed = (scores * scale).softmax(-1).to(value.dtype) @ value
        states: Tensor = self.after(self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        return states


class FeedForward(nn.Module):
    """A gated layer with a norm before its last matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside = (nn.LayerNorm(width, elementwise_affine=False) for width in (WIDTH, INNER))
        self.up, self.down = nn.Linear(WIDTH, 2 * INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        values, gate = self.up(self.before(hidden)).chunk(2, dim=-1)
        states: Tensor = self.down(self.inside(values * F.gelu(gate)))
        return states


def buckets(length: int) -> Tensor:
    """Bucket (L, L) of the distance between two positions: exact when near, logarithmic when far."""
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    middle = BUCKETS // 2
    size = distance.abs().clamp(min=1)
    far = middle + ((size / middle).log() / math.log((LONGEST - 1) / middle) * (middle - 1)).ceil().long()
    return BUCKETS - 1 + distance.sign() * torch.where(size < middle, distance.abs(), far.clamp(max=BUCKETS - 1))


def train(network: Network, data: TokenData, request: argparse.Namespace) -> dict[str, Any]:
    """Train until the processor time is used up. Return the number of tokens, the seconds and the last losses."""
    split, special = data.split("train"), data.special_tokens
    matrices = [weight for weight in network.parameters() if weight.ndim > 1]
    others = [weight for weight in network.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=request.rate, betas=(0.9, 0.98), fused=True)
    body = request.length - 2
    starts = torch.randperm((split.num_tokens - 1) // body)
    frame = torch.tensor([special.cls]), torch.tensor([special.sep])
    losses: list[float] = []
    begin, step = time.process_time(), 0
    while (used := (time.process_time() - begin) / request.seconds) < 1:
        chosen_rows = [int(starts[(step * request.rows + row) % len(starts)]) * body for row in range(request.rows)]
        texts = [torch.from_numpy(split.read(start, start + body).astype("int64")) for start in chosen_rows]
        ids = torch.stack([torch.cat([frame[0], text, frame[1]]) for text in texts])
        inside = torch.zeros_like(ids, dtype=torch.bool)
        inside[:, 1:-1] = True
        chosen = (torch.rand(ids.shape) < CHOSEN) & inside
        kind = torch.rand(ids.shape)
        masked = torch.where(chosen & (kind < MASKED), special.mask, ids)
        masked = torch.where(chosen & (kind >= 1 - REPLACED), torch.randint(data.vocab_size, ids.shape), masked)
        with torch.autocast("cpu", torch.bfloat16):
            logits = network.logits(network(masked)[chosen])
        mean = F.cross_entropy(logits.float(), ids[chosen])
        mean.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), 2.0)
        rate = request.rate * min(used / WARM_UP, 0.5 * (1 + math.cos(math.pi * max(0.0, used - WARM_UP) / (1 - WARM_UP))))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        losses, step = [*losses[-99:], mean.item()], step + 1
    tokens = step * request.rows * request.length
    parameters = sum(weight.numel() for weight in network.parameters())
    seconds = time.process_time() - begin
    return {
        "rate": request.rate,
        "tokens": tokens,
        "seconds": seconds,
        "loss": sum(losses) / len(losses),
        "parameters": parameters,
    }


@torch.inference_mode()
def pseudo_log_likelihood(network: Network, row: list[int], mask: int) -> float:
    """The sum of the log-probabilities of the tokens of a row, each masked in turn; the first and the last are no tokens."""
    places = torch.arange(1, len(row) - 1)
    ids = torch.tensor(row).repeat(len(places), 1)
    truth = ids[0, places]
    ids[torch.arange(len(places)), places] = mask
    states = network(ids)[torch.arange(len(places)), places]
    return float(network.logits(states).log_softmax(-1)[torch.arange(len(places)), truth].sum())


if __name__ == "__main__":
    main()
