"""What helps small networks: the local start, the place of the LayerNorms, disentangled embeddings, the bilinear term."""

import math

import pytest
import torch

from discern.corruption.randomness import Randomness
from discern.models.base import initialize
from discern.models.config import build_config
from discern.models.electra.encoder import BertEncoder
from discern.models.heads import BilinearTerm
from discern.models.layers import DisentangledEmbeddings, Embeddings
from discern.objectives.rtd import ReplacedTokenDetection, RTDConfig
from discern.types import TokenBatch
from tests.support import SPECIAL, make_batch, settings


def local_encoder(**sizes: object) -> BertEncoder:
    defaults = {"num_layers": 1, "hidden_size": 128, "embedding_size": 128, "num_heads": 4, "feedforward_size": 256}
    config = build_config(**(defaults | {"max_positions": 64, "initialization": "local"} | sizes))  # type: ignore[arg-type]
    encoder = BertEncoder(Embeddings(1000, config.embedding_size, config), config)
    initialize(encoder, torch.Generator().manual_seed(0), config)
    return encoder.eval()


def attention_of_first_block(encoder: BertEncoder) -> torch.Tensor:
    """Mean probability by head and offset from -31 to 31, seen from the positions that have them all."""
    ids = torch.randint(5, 1000, (16, 64), generator=torch.Generator().manual_seed(1))
    hidden = encoder.embeddings(ids, None, None)
    if encoder.projection is not None:
        hidden = encoder.projection(hidden)
    attention = encoder.blocks[0].attention
    heads = attention.num_heads
    query, key = (part(hidden).unflatten(-1, (heads, -1)).transpose(1, 2) for part in (attention.query, attention.key))
    probabilities = (query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])).softmax(-1).mean(0)
    return torch.stack([probabilities[:, place, place - 31 : place + 32] for place in range(31, 33)]).mean(0)


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 192}, {"embedding_size": 96}, {"hidden_size": 64, "num_heads": 2}])
def test_heads_begin_by_looking_at_near_neighbors(sizes: dict[str, int]) -> None:
    encoder = local_encoder(**sizes)
    by_offset = attention_of_first_block(encoder).detach()
    for head, offset in enumerate([-1, 1, -2, 2][: encoder.config.num_heads]):
        assert int(by_offset[head].argmax()) - 31 == offset
        assert by_offset[head].max() > 8 / 64, "well above an even spread"


def test_the_released_start_looks_everywhere() -> None:
    by_offset = attention_of_first_block(local_encoder(initialization="released"))
    assert by_offset.max() < 2 / 64


def test_the_local_start_changes_values_only() -> None:
    shapes = [
        {name: parameter.shape for name, parameter in local_encoder(initialization=kind).named_parameters()}
        for kind in ("local", "released")
    ]
    assert shapes[0] == shapes[1]


def test_pre_norm_by_hand() -> None:
    # With every product at zero a pre-norm block hands its input on, and the encoder gives the final norm of the embeddings.
    encoder = local_encoder(normalization="pre", initialization="released", num_layers=2)
    with torch.no_grad():
        for block in encoder.blocks:
            for part in (block.attention.output, block.contract):
                part.weight.zero_()
                part.bias.zero_()
    ids = torch.randint(5, 1000, (2, 9))
    expected = torch.nn.functional.layer_norm(encoder.embeddings(ids, None, None), (128,), eps=1e-12)
    torch.testing.assert_close(encoder(ids), expected)


def tables() -> tuple[Embeddings, DisentangledEmbeddings]:
    config = build_config(hidden_size=8, num_heads=1, max_positions=16)
    shared = Embeddings(30, 8, config)
    both = torch.nn.ModuleList([shared, DisentangledEmbeddings(shared, config)])
    initialize(both, torch.Generator().manual_seed(0), config)
    return both[0].eval(), both[1].eval()  # type: ignore[return-value]


def test_disentangled_embeddings_begin_as_the_shared_ones_and_send_nothing_back() -> None:
    shared, disentangled = tables()
    ids = torch.randint(0, 30, (3, 7))
    torch.testing.assert_close(disentangled(ids, None, None), shared(ids, None, None))
    disentangled(ids, None, None).square().sum().backward()
    assert all(parameter.grad is None for parameter in shared.parameters())
    assert disentangled.difference.weight.grad is not None


def test_merged_embeddings_give_the_same_vectors() -> None:
    _, disentangled = tables()
    with torch.no_grad():
        disentangled.difference.weight.normal_()
        disentangled.norm.weight.normal_()
    ids = torch.randint(0, 30, (3, 7))
    torch.testing.assert_close(disentangled.merged()(ids, None, None), disentangled(ids, None, None))


def test_the_bilinear_term_by_hand() -> None:
    term = BilinearTerm(build_config(hidden_size=2, num_heads=1), 2)
    with torch.no_grad():
        term.context.weight.copy_(torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    hidden, words = torch.tensor([[[1.0, 1.0]]]), torch.tensor([[[10.0, 100.0]]])
    assert term(hidden, words).item() == 3 * 10 + 1 * 100


VARIANTS = [
    {"tying": "none"},
    {"tying": "token"},
    {"tying": "gradient-disentangled"},
    {"tying": "gradient-disentangled", "discriminator_head": "bilinear"},
    {"discriminator_head": "bilinear", "generator_size": 1.0},
]


def batch() -> TokenBatch:
    rng = torch.Generator().manual_seed(0)
    return make_batch([[SPECIAL.cls, *torch.randint(5, 50, (20,), generator=rng).tolist(), SPECIAL.sep] for _ in range(16)])


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("model", [{}, {"normalization": "pre", "initialization": "local"}])
def test_every_variant_trains_every_parameter(options: dict[str, object], model: dict[str, object]) -> None:
    objective = ReplacedTokenDetection(RTDConfig(**options), settings(**model))  # type: ignore[arg-type]
    objective.initialize(0)
    tokens = batch()
    randomness = Randomness(0, 0, tokens.slot)
    output = objective(objective.corrupt(tokens, randomness), randomness)
    torch.stack([term.weight * term.total / term.count for term in output.terms.values()]).sum().backward()
    for key, parameter in objective.named_parameters():
        assert parameter.grad is not None, key
        # A key's bias shifts all scores of a query alike, so its gradient is zero but for rounding.
        assert parameter.grad.any() or key.endswith("key.bias"), key


def test_disentangled_sharing_keeps_the_discriminator_off_the_shared_words() -> None:
    objective = ReplacedTokenDetection(RTDConfig(tying="gradient-disentangled"), settings())
    objective.initialize(0)
    tokens = batch()
    randomness = Randomness(0, 0, tokens.slot)
    output = objective(objective.corrupt(tokens, randomness), randomness)
    output.terms["discriminator"].total.backward()
    touched = {name for name, parameter in objective.named_parameters() if parameter.grad is not None and parameter.grad.any()}
    assert touched
    assert not [name for name in touched if "shared" in name or name.startswith("generator")]
