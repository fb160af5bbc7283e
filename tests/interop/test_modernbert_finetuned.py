"""Task heads of ModernBERT: anybody's folder is read, and what is exported is read by transformers, with the same numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from discern.artifacts.opening import open_model
from discern.artifacts.task_model import TaskModel
from discern.convert.export_finetuned import head_weights
from discern.errors import CheckpointError, ConfigError
from discern.interop.families import finetuned_to_huggingface
from discern.interop.finetuned import HeadWeights, Summary
from discern.models.base import Encoder, build_embeddings, build_encoder
from discern.models.config import build_config
from discern.tasks.base import Labels
from discern.tasks.classification import Classification, ClassificationConfig
from discern.tasks.features import TaskRows
from discern.tasks.supervised import SupervisedObjective
from tests.interop.small_tokenizers import small_tokenizer
from tests.parity.small_networks import VOCABULARY, make_noisy, token_batch
from tests.parity.small_networks import build as build_electra
from tests.parity.small_networks import sizes as electra_sizes
from tests.parity.small_xlnet import build_network as build_xlnet
from tests.parity.small_xlnet import sizes as xlnet_sizes

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
BATCH = token_batch([11, 7, 3], second=[4, 3, 2])
ENDINGS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def fresh(width: int = 32, **changes: Any) -> Encoder:
    """An encoder of ours of four layers."""
    given = {"encoder": "modernbert", "num_layers": 4, "hidden_size": width, "embedding_size": width, "feedforward_size": 24}
    config = build_config({**given, **changes})
    return build_encoder(build_embeddings(VOCABULARY.size, width, config), config)


def saved(folder: Path, ending: str, **options: Any) -> Any:
    """A model of transformers in a folder, every parameter far from zero and from one."""
    import transformers

    config = transformers.ModernBertConfig(
        vocab_size=VOCABULARY.size + 200,  # of the tokenizer
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        local_attention=4,
        pad_token_id=0,
        **{"num_labels": 2 if ending == "ForQuestionAnswering" else 4, **options},
    )
    model = getattr(transformers, f"ModernBert{ending}")(config).eval()
    make_noisy(model)
    model.save_pretrained(folder)
    small_tokenizer("wordpiece, lower-cased").save(str(folder / "tokenizer.json"))
    return model


def logits(model: TaskModel) -> Tensor:
    """Outputs of the head for the batch: classes, tags, or start and end."""
    (head,) = model.objective.heads.values()
    hidden = model.objective.encoder(BATCH.input_ids, BATCH.attention_mask)
    # What the encoder gives for padding is undefined, and must not count.
    hidden = hidden.masked_fill(~BATCH.attention_mask[..., None], float("nan"))
    found: dict[str, Tensor] = head(hidden, BATCH, TaskRows("own", torch.arange(3), torch.arange(3), {}))[1]
    if "logits" in found:
        return found["logits"]
    count = BATCH.input_ids.shape[1]
    scores = [torch.zeros(3, count).scatter(1, found[f"{name}s"], found[f"{name}_scores"]) for name in ("start", "end")]
    return torch.stack(scores, -1)


def expected(model: Any) -> Tensor:
    said = model(BATCH.input_ids, attention_mask=BATCH.attention_mask.long())
    return torch.stack([said.start_logits, said.end_logits], -1) if "start_logits" in said else said.logits


def compared(ours: Tensor, theirs: Tensor) -> None:
    """Equal at every real token; for questions, where answers may be."""
    if theirs.dim() == 3:
        real = BATCH.attention_mask.clone()
        if theirs.shape[-1] == 2:
            real &= BATCH.token_type_ids == 1
        ours, theirs = ours[real], theirs[real]
    assert theirs.std() > 0.1, "the weights hide differences"
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


def exported(model: TaskModel, folder: Path, **changes: Any) -> Any:
    """What transformers makes of an export: all of it, and nothing drawn."""
    import transformers

    ((name, task),) = model.objective.tasks.items()
    weights = head_weights(task, model.objective.heads[name])
    assert isinstance(weights, HeadWeights)
    written = finetuned_to_huggingface(model.objective.encoder, replace(weights, **changes), VOCABULARY)
    folder.mkdir()
    written.write(folder)
    kind = getattr(transformers, written.config["architectures"][0])
    found, info = kind.from_pretrained(folder, output_loading_info=True)
    assert {key: list(value) for key, value in info.items() if value} == {}
    return found.eval()


@pytest.mark.parametrize("ending", [*ENDINGS, "mean"])
@pytest.mark.parametrize("classifier_bias", [False, True])
@pytest.mark.parametrize("norm_bias", [False, True])
@torch.no_grad()
def test_in_and_out_again(tmp_path: Path, ending: str, classifier_bias: bool, norm_bias: bool) -> None:
    pooling = "mean" if ending == "mean" else "cls"
    options = {"classifier_bias": classifier_bias, "norm_bias": norm_bias, "classifier_pooling": pooling}
    theirs = saved(tmp_path, ENDINGS[0] if ending == "mean" else ending, **options)
    ours = open_model(tmp_path, warn=pytest.fail).task_model()
    compared(logits(ours), expected(theirs))
    back = exported(ours, tmp_path / "out")
    assert type(back) is type(theirs)
    assert {key: getattr(back.config, key) for key in options} == options
    compared(expected(back), expected(theirs))


@torch.no_grad()
def test_the_older_form_of_the_configuration(tmp_path: Path) -> None:
    theirs = saved(tmp_path, ENDINGS[0])
    config = json.loads((tmp_path / "config.json").read_text())
    thetas = {"full_attention": 900.0, "sliding_attention": 30.0}
    for kind, theta in thetas.items():
        theirs.config.rope_parameters[kind]["rope_theta"] = theta
    model = type(theirs)(theirs.config).eval()
    model.load_state_dict(theirs.state_dict())
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types", "classifier_pooling")}
    old |= {"global_rope_theta": 900.0, "local_rope_theta": 30.0, "global_attn_every_n_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(old))
    compared(logits(open_model(tmp_path, warn=pytest.fail).task_model()), expected(model))


@torch.no_grad()
def test_the_unit_of_a_score_is_folded_in(tmp_path: Path) -> None:
    theirs = saved(tmp_path, ENDINGS[0], num_labels=1)
    ours = open_model(tmp_path, warn=pytest.fail).task_model()
    assert ours.task().labels == Labels((), "number")
    back = exported(ours, tmp_path / "out", scale=2.5, shift=3.0)
    assert back.config.problem_type == "regression"
    compared(expected(back), 2.5 * expected(theirs) + 3)


def test_damaged_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, ENDINGS[0], classifier_pooling="mean")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "classifier_pooling": "max"}))
    with pytest.raises(CheckpointError, match="its task settings"):
        open_model(tmp_path, warn=pytest.fail).task_model()
    (tmp_path / "config.json").write_text(json.dumps({**config, "classifier_bias": True}))
    with pytest.raises(CheckpointError, match=r"no 'inner\.dense\.bias' of the head"):
        open_model(tmp_path, warn=pytest.fail).task_model()


def classifier(encoder: Encoder, **settings: Any) -> SupervisedObjective:
    task = Classification("own", ClassificationConfig(**settings), ("accuracy",), Labels(("a", "b", "c")))
    return SupervisedObjective(encoder, {"own": task})


@pytest.mark.parametrize("initialization", ["released", "local"])
def test_a_head_starts_as_those_of_modernbert(initialization: Literal["released", "local"]) -> None:
    """Normals truncated at two sigma, with 0.88 of the nominal deviation."""
    encoder = fresh(128, attention_bias=True, classifier_bias=True, initialization=initialization)
    made = classifier(encoder, head="prediction")
    make_noisy(made.heads)
    torch.nn.init.ones_(made.heads["own"].inner.norm.weight)
    made.initialize(3)
    head = made.heads["own"]
    dense = (0.02 if initialization == "released" else 128**-0.5) / 8**0.5
    assert float(head.inner.dense.weight.detach().std()) == pytest.approx(0.88 * dense, rel=0.05)
    assert float(head.output.weight.detach().std()) == pytest.approx(0.88 * 128**-0.5, rel=0.15)
    assert not head.inner.dense.bias.any()
    assert not head.output.bias.any()


@pytest.mark.parametrize("kind", ["electra", "xlnet"])
@pytest.mark.parametrize(
    ("settings", "says", "hint"),
    [
        ({"head": "prediction"}, "has no LayerNorm before its last layer", "task.head=linear"),
        ({"pooling": "mean"}, "reads the state of .CLS., and this head the mean", "task.pooling=cls"),
    ],
)
def test_other_architectures_have_no_such_heads(kind: str, settings: dict[str, str], says: str, hint: str) -> None:
    electra = build_electra(electra_sizes()).networks()["discriminator"].encoder
    encoder = electra if kind == "electra" else build_xlnet(xlnet_sizes()).encoder
    made = classifier(encoder, **settings)
    with pytest.raises(ConfigError, match=says) as caught:
        finetuned_to_huggingface(encoder, head_weights(made.tasks["own"], made.heads["own"]), VOCABULARY)
    assert hint in str(caught.value.hint)


def test_a_layer_is_not_dropped_silently() -> None:
    """Taggers of ELECTRA have a single layer."""
    electra = build_electra(electra_sizes()).networks()["discriminator"].encoder
    layer = Summary(torch.eye(32), None, "gelu")
    with pytest.raises(ConfigError, match="ElectraForTokenClassification has no summary layer"):
        finetuned_to_huggingface(electra, HeadWeights("tagging", torch.eye(32), torch.zeros(32), summary=layer), VOCABULARY)


def test_modernbert_has_no_head_without_these_layers() -> None:
    encoder = fresh()
    made = classifier(encoder)
    with pytest.raises(ConfigError, match="ModernBertForSequenceClassification has a dense layer") as caught:
        finetuned_to_huggingface(encoder, head_weights(made.tasks["own"], made.heads["own"]), VOCABULARY)
    assert "task.head=prediction" in str(caught.value.hint)
