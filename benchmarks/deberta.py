"""The training step of DeBERTaV3 against that of transformers, in turns: replaced token detection, disentangled embeddings.

    python benchmarks/deberta.py [--preset deberta-v3-xsmall] [--rows 8] [--length 128] [--runs 3]

The peer is what users of transformers write: two `DebertaV2` networks, AdamW, float32, logits of the generator at the masked
positions only, samples by Gumbel noise. Both have the same sizes, vocabulary and rows without padding. Prints JSON lines, then
the medians. Each measurement is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

PRECISIONS = ("float32", "bfloat16")
MASK, FIRST = 4, 5  # id of [MASK], and the first id that is not special


def peer_speed(preset: str, rows: int, length: int, steps: int = 5) -> float:
    """Tokens per second of the median step of transformers."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F
    from transformers import DebertaV2Config, DebertaV2ForMaskedLM, DebertaV2Model

    from discern.config.resolve import usual_vocabulary
    from discern.models.deberta.huggingface import DebertaArchitecture
    from discern.training.config import load_pretrain_config
    from discern.types import SpecialTokens

    sizes, vocab = load_pretrain_config(None, preset).config.model, usual_vocabulary(preset)
    special = SpecialTokens(pad=0, unk=1, cls=2, sep=3, mask=MASK)
    stated = DebertaArchitecture().config_json(sizes, vocab, "words", special, "float32")
    width = sizes.hidden_size
    generator = DebertaV2ForMaskedLM(DebertaV2Config(**stated | {"num_hidden_layers": sizes.num_layers // 2, "legacy": False}))
    discriminator = DebertaV2Model(DebertaV2Config(**stated))
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))
    difference = nn.Parameter(torch.zeros(vocab, width))
    words = generator.deberta.embeddings.word_embeddings.weight
    del discriminator.embeddings.word_embeddings.weight
    weights = [*generator.parameters(), *discriminator.parameters(), *head.parameters(), difference]
    optimizer = torch.optim.AdamW(weights, lr=5e-4, weight_decay=0.01)
    generator.train(), discriminator.train()

    def step(ids: Tensor) -> None:
        chosen = torch.rand(ids.shape) < 0.15
        states = generator.deberta(ids.masked_fill(chosen, MASK)).last_hidden_state
        logits = generator.lm_predictions(states[chosen], generator.deberta.embeddings.word_embeddings)
        with torch.no_grad():
            gumbel = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
            corrupted = ids.masked_scatter(chosen, (logits + gumbel).argmax(-1))
        discriminator.embeddings.word_embeddings.weight = words.detach() + difference
        states = discriminator(corrupted).last_hidden_state
        judged = head(states[:, :1] + states)[..., 0]
        replaced = F.binary_cross_entropy_with_logits(judged, (corrupted != ids).float())
        (F.cross_entropy(logits, ids[chosen]) + 50 * replaced).backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds = []
    for _ in range(steps + 1):
        ids = torch.randint(FIRST, vocab, (rows, length))
        began = time.perf_counter()
        step(ids)
        seconds.append(time.perf_counter() - began)
    return rows * length / statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="deberta-v3-xsmall")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peer", action="store_true", help="measure the peer alone, once")
    given = parser.parse_args()
    if given.peer:
        print(json.dumps({"tokens_per_second": peer_speed(given.preset, given.rows, given.length)}))
        return
    same = ["--preset", given.preset, "--rows", str(given.rows), "--length", str(given.length)]
    commands = {"transformers": [sys.executable, __file__, "--peer", *same]}
    settings = {"data.sequence_length": given.length}
    settings |= {"train.sequences_per_step": given.rows, "train.micro_batch_size": given.rows}
    for precision in PRECISIONS:
        pairs = [f"--set={key}={value}" for key, value in (settings | {"train.precision": precision}).items()]
        commands[precision] = [sys.executable, "-m", "discern", "bench", "--preset", given.preset, "--json", *pairs]
    speeds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(given.runs):
        for name, command in commands.items():
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            speeds[name].append(json.loads(done.stdout.splitlines()[-1])["tokens_per_second"])
            print(json.dumps({"name": name, "tokens_per_second": round(speeds[name][-1], 1)}), flush=True)
    peer = statistics.median(speeds["transformers"])
    for name, values in speeds.items():
        print(f"{name}: {statistics.median(values):,.0f} tokens/s, {statistics.median(values) / peer:.2f} times transformers")


if __name__ == "__main__":
    main()
