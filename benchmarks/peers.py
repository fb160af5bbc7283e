"""Peers to compare the speed of a training step with, on transformers, as their users write them; compiled on a GPU.

`gpu.py` runs them. Each peer takes rows of ids without padding, masks them on the device, and updates its weights by AdamW
with gradients clipped, in bfloat16 autocast. By itself: `python benchmarks/peers.py --small`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MASK, FIRST = 4, 5  # id of [MASK], and the first id that is not special
PROBABILITY = 0.15
GENERATOR_SHARE, DISCRIMINATOR_WEIGHT = 0.25, 50.0

Step = Callable[[Tensor], Tensor]
"""Trains on (B, L) ids; returns the loss, on the device."""


def electra_step(sizes: dict[str, int], vocab: int, length: int, device: torch.device, *, compiled: bool) -> Step:
    """Replaced token detection with `ElectraForMaskedLM` and `ElectraForPreTraining`.

    Logits of the generator at all positions, as its `forward` gives them; samples by Gumbel noise.

    Args:
        sizes: hidden_size, num_layers, num_heads, embedding_size and feedforward_size of the discriminator.
    """
    from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

    def config(share: float) -> ElectraConfig:
        return ElectraConfig(
            vocab_size=vocab,
            embedding_size=sizes["embedding_size"],
            hidden_size=round(sizes["hidden_size"] * share),
            num_hidden_layers=sizes["num_layers"],
            num_attention_heads=max(1, round(sizes["num_heads"] * share)),
            intermediate_size=round(sizes["feedforward_size"] * share),
            max_position_embeddings=max(length, 128),
        )

    generator = ElectraForMaskedLM(config(GENERATOR_SHARE)).to(device).train()
    discriminator = ElectraForPreTraining(config(1.0)).to(device).train()
    discriminator.electra.embeddings = generator.electra.embeddings  # shared, as in the paper
    run_generator, run_discriminator = _compiled((generator, discriminator), compiled)
    weights = list({id(each): each for model in (generator, discriminator) for each in model.parameters()}.values())
    optimizer = torch.optim.AdamW(weights, lr=5e-4, weight_decay=0.01, fused=device.type == "cuda")

    def step(ids: Tensor) -> Tensor:
        masked_ids, chosen = _masked(ids)
        with torch.autocast(device.type, torch.bfloat16):
            logits = run_generator(input_ids=masked_ids).logits
            generator_loss = _masked_loss(logits, ids, chosen)
            with torch.no_grad():
                noise = -torch.log(-torch.log(torch.rand_like(logits, dtype=torch.float32).clamp(1e-9, 1 - 1e-7)))
                sampled = (logits.float() + noise).argmax(-1)
            corrupted = torch.where(chosen, sampled, ids)
            replaced = run_discriminator(input_ids=corrupted).logits.float()
            found = F.binary_cross_entropy_with_logits(replaced, (corrupted != ids).float())
        return _update(generator_loss + DISCRIMINATOR_WEIGHT * found, weights, optimizer)

    return step


def modernbert_step(sizes: dict[str, int], vocab: int, length: int, device: torch.device, *, compiled: bool) -> Step:
    """Masked language modeling with `ModernBertForMaskedLM`, whose padded attention runs in torch's SDPA.

    Args:
        sizes: as for `electra_step`; the embeddings are as wide as the hidden states.
    """
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    config = ModernBertConfig(
        vocab_size=vocab,
        hidden_size=sizes["hidden_size"],
        num_hidden_layers=sizes["num_layers"],
        num_attention_heads=sizes["num_heads"],
        intermediate_size=sizes["feedforward_size"],
        max_position_embeddings=max(length, 128),
        pad_token_id=0,
        bos_token_id=2,
        cls_token_id=2,
        eos_token_id=3,
        sep_token_id=3,
        attn_implementation="sdpa",
    )
    model = ModernBertForMaskedLM(config).to(device).train()
    (run,) = _compiled((model,), compiled)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=5e-4, weight_decay=0.01, fused=device.type == "cuda")

    def step(ids: Tensor) -> Tensor:
        masked_ids, chosen = _masked(ids)
        with torch.autocast(device.type, torch.bfloat16):
            loss = _masked_loss(run(input_ids=masked_ids).logits, ids, chosen)
        return _update(loss, weights, optimizer)

    return step


PEERS = {"electra": electra_step, "modernbert": modernbert_step}


def time_step(step: Step, ids: Tensor, seconds: float) -> dict[str, float]:
    """The speed of a step on the same ids: median of the steps that fit into the seconds, of at least three."""

    def wait() -> None:
        if ids.is_cuda:
            torch.cuda.synchronize()

    for _ in range(2):  # compilation, caches, moments
        step(ids)
    wait()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < seconds and len(times) < 200):
        begin = time.perf_counter()
        step(ids)
        wait()
        times.append(time.perf_counter() - begin)
    median = statistics.median(times)
    return {"tokens_per_second": ids.numel() / median, "step_milliseconds": 1000 * median, "steps": len(times)}


def random_ids(rows: int, length: int, vocab: int, device: torch.device) -> Tensor:
    """Rows of random ids without special tokens; what they say changes no speed."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(FIRST, vocab, (rows, length), generator=generator).to(device)


def _compiled(models: tuple[torch.nn.Module, ...], compiled: bool) -> list[Any]:
    return [torch.compile(model) if compiled else model for model in models]


def _masked(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The ids with [MASK] in random places, and the places."""
    chosen = torch.rand(ids.shape, device=ids.device) < PROBABILITY
    return ids.masked_fill(chosen, MASK), chosen


def _masked_loss(logits: Tensor, ids: Tensor, chosen: Tensor) -> Tensor:
    """Mean cross-entropy at the chosen places, as `transformers` computes it from labels of -100."""
    return F.cross_entropy(logits.float().flatten(0, 1), ids.masked_fill(~chosen, -100).flatten())


def _update(loss: Tensor, weights: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="two layers and few rows; always so without a GPU")
    parser.add_argument("--seconds", type=float, default=3.0, help="time to measure each peer")
    request = parser.parse_args()
    cuda = torch.cuda.is_available()
    small = request.small or not cuda
    device = torch.device("cuda" if cuda else "cpu")
    sizes = {"num_layers": 12, "hidden_size": 256, "embedding_size": 128, "num_heads": 4, "feedforward_size": 1024}
    if small:
        sizes = {"num_layers": 2, "hidden_size": 64, "embedding_size": 64, "num_heads": 4, "feedforward_size": 128}
    rows, length, vocab = (8, 32, 1000) if small else (512, 128, 30_522)
    ids = random_ids(rows, length, vocab, device)
    for name, build in PEERS.items():
        torch.manual_seed(0)
        found = time_step(build(sizes, vocab, length, device, compiled=cuda), ids, request.seconds)
        print(json.dumps({"peer": name, "compiled": cuda, "rows": rows, "length": length, **found}), flush=True)


if __name__ == "__main__":
    main()
