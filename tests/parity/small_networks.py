"""Small networks with weights that hide nothing, batches for them, and their Hugging Face counterparts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from discern.model_files.huggingface import network_to_huggingface
from discern.models.base import Network, build_embeddings, build_encoder
from discern.models.config import ModelConfig, build_config
from discern.objectives import objectives
from discern.objectives.base import BuildSettings, Objective, Vocabulary
from discern.types import SpecialTokens, TokenBatch

VOCABULARY = Vocabulary(97, SpecialTokens(pad=0, unk=1, cls=2, sep=3, mask=4))
SIZES = {"num_layers": 2, "hidden_size": 32, "embedding_size": 16, "num_heads": 4, "feedforward_size": 48, "max_positions": 40}
TIED = {f"{name}.weight" for name in ("decoder", "cls.predictions.decoder", "generator_lm_head", "lm_loss")}
TIED.add("cls.predictions.decoder.bias")


def sizes(**changes: Any) -> ModelConfig:
    """A tiny encoder without dropout."""
    return build_config(**{**SIZES, "hidden_dropout": 0.0, "attention_dropout": 0.0, **changes})


def build(model: ModelConfig, name: str = "rtd", *, seed: int = 0, checkpointing: bool = False, **settings: Any) -> Objective:
    """An objective in evaluation mode whose every parameter is far from zero and from one."""
    kind = objectives.load(name)
    objective: Objective = kind(kind.Config(name=name, **settings), BuildSettings(model, VOCABULARY, checkpointing))
    make_noisy(objective, seed)
    return objective.eval()


@torch.no_grad()
def make_noisy(module: nn.Module, seed: int = 0) -> None:
    """Fill every parameter so that a part forgotten or swapped changes the output."""
    random = torch.Generator().manual_seed(seed)
    for part in module.modules():
        for name, value in part.named_parameters(recurse=False):
            noise = torch.randn(value.shape, generator=random)
            if isinstance(part, nn.LayerNorm) and name == "weight":
                value.copy_(1 + 0.3 * noise)
            else:
                value.copy_((0.9 / value.shape[-1] ** 0.5 if value.dim() == 2 else 0.3) * noise)
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            part.weight.mul_(2)


def token_batch(
    lengths: Sequence[int], width: int | None = None, *, second: Sequence[int] | None = None, seed: int = 0
) -> TokenBatch:
    """Rows `[CLS] ... [SEP]` of the given lengths, padded to `width`; row i has segment 1 from position second[i] on."""
    width = width or max(lengths)
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCABULARY.size, (len(lengths), width), generator=random)
    positions = torch.arange(width).expand(len(lengths), -1)
    ends = torch.tensor(lengths)[:, None]
    ids = torch.where(positions == 0, VOCABULARY.special.cls, ids)
    ids = torch.where(positions == ends - 1, VOCABULARY.special.sep, ids)
    real = positions < ends
    ids = torch.where(real, ids, VOCABULARY.special.pad)
    starts = torch.tensor(second if second is not None else [width] * len(lengths))[:, None]
    return TokenBatch(
        input_ids=ids,
        attention_mask=real,
        special_tokens_mask=~real | (positions == 0) | (positions == ends - 1),
        token_type_ids=((positions >= starts) & real).long(),
        position_ids=positions.clone(),
        document_ids=None,
        word_starts=None,
        example_index=torch.arange(len(lengths)),
        slot=torch.arange(len(lengths)),
        full=bool(real.all()),
    )


def network_logits(network: Network, batch: TokenBatch) -> Tensor:
    """Logits of the head at every position."""
    mask = None if batch.full else batch.attention_mask
    logits: Tensor = network.head(network.encoder(batch.input_ids, mask, batch.token_type_ids, batch.position_ids))
    return logits


def network_of(config: ModelConfig, head: Callable[[ModelConfig], nn.Module] | None = None) -> Network:
    """An encoder with a head, its own one by default, in evaluation mode, every parameter far from zero and from one."""
    encoder = build_encoder(build_embeddings(VOCABULARY.size, config.embedding_size, config), config)
    network = Network(encoder, head(config) if head else encoder.language_head())
    parts = nn.ModuleList(network.parts())
    make_noisy(parts)
    parts.eval()
    return network


def counterpart(network: Network, left_out: str = "mask_predictions.", **settings: Any) -> Any:
    """The model of transformers with the same weights, in evaluation mode, loaded from what an export writes."""
    import transformers

    exported = network_to_huggingface(network, VOCABULARY.special)
    kind = getattr(transformers, exported.loads_as)
    model = kind(kind.config_class(**{**exported.config, **settings}))
    bare = f"{model.base_model_prefix}." if model.base_model is model else ""
    weights = {name.removeprefix(bare): tensor for name, tensor in exported.tensors.items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= TIED
    assert all(name.startswith(left_out) for name in unexpected)
    model.tie_weights()
    return model.eval()


def padded_rows(length: int, *, padded: bool = True) -> tuple[Tensor, Tensor]:
    """Three rows of ids, two of them padded; and which tokens are real."""
    ids = torch.randint(5, VOCABULARY.size, (3, length), generator=torch.Generator().manual_seed(length))
    ends = torch.tensor([length, max(1, length * 2 // 3), 1] if padded else [length] * 3)
    return ids, torch.arange(length) < ends[:, None]


def inputs(batch: TokenBatch) -> dict[str, Tensor]:
    """A batch as transformers takes it."""
    return {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask.long(),
        "token_type_ids": batch.token_type_ids,
    }
