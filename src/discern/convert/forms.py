"""The same weights as another architecture of transformers, which more servers support: ELECTRA's body is a BERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor

from discern.errors import ConfigError
from discern.interop.config_json import MARK
from discern.interop.huggingface import HuggingFaceModel
from discern.models.electra.huggingface import bert_name

Form: TypeAlias = Literal["electra", "bert", "modernbert"]
"""The `model_type` of an export."""
FORMS: tuple[str, ...] = get_args(Form)
BERT_ENCODER_CLASS, BERT_LM_CLASS = "BertModel", "BertForMaskedLM"

# The classes that compute the same under BERT's names. A discriminator's head has no class there, so that it becomes a body.
_AS_BERT = {
    "ElectraModel": BERT_ENCODER_CLASS,
    "ElectraForPreTraining": BERT_ENCODER_CLASS,
    "ElectraForMaskedLM": BERT_LM_CLASS,
    "ElectraForTokenClassification": "BertForTokenClassification",
    "ElectraForQuestionAnswering": "BertForQuestionAnswering",
}
_ELECTRA_ONLY = ("embedding_size", "summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout")
# What later commands know of a run does not hold for its body alone.
_OF_A_RUN = ("objective", "networks", "gives", "head")


def check_form(form: str) -> None:
    """Raise a ConfigError if there is no such form."""
    if form not in FORMS:
        raise ConfigError(f"no model can be exported as '{form}'", hint=f"choose {', '.join(FORMS[:-1])} or {FORMS[-1]}")


def in_form(model: HuggingFaceModel, form: Form) -> HuggingFaceModel:
    """A model under the names of another architecture, which computes the same.

    Args:
        model: a network or a fine-tuned model in its natural form.
        form: its own `model_type`, or 'bert' for an ELECTRA whose embeddings are as wide as its hidden states. The head of a
            discriminator has no class in BERT and is left out; BERT's pooler, which ELECTRA lacks, is not written.

    Raises:
        ConfigError: that architecture cannot express the model, with the reason.
    """
    natural = model.config["model_type"]
    if form == natural:
        return model
    if form != "bert" or natural != "electra":
        raise ConfigError(
            f"this model is of the type '{natural}', and as '{form}' its weights would compute something different",
            hint=f"use --as {natural}, which is the default" + (", or --as bert" if natural == "electra" else ""),
        )
    return _as_bert(model)


def _as_bert(model: HuggingFaceModel) -> HuggingFaceModel:
    config = model.config
    width, size = config["embedding_size"], config["hidden_size"]
    if width != size:
        raise ConfigError(
            f"BERT cannot express this model: its embeddings are {width} wide and its hidden states {size}, and BERT has neither "
            "the projection between them nor a place for the LayerNorm before it",
            hint=f"leave out --as bert; models with model.embedding_size={size} can be exported as bert",
        )
    theirs = _AS_BERT.get(config["architectures"][0])
    if theirs is None:
        raise ConfigError(
            f"BERT has no class that computes the same as {config['architectures'][0]}: its classifier has a tanh where that of "
            "ELECTRA has a GELU",
            hint="leave out --as bert",
        )
    if theirs == BERT_LM_CLASS and model.head:
        raise ConfigError("BERT has no head that copies tokens", hint="leave out --as bert")
    if theirs == BERT_ENCODER_CLASS and model.head and _is_bare(model.tensors):
        raise ConfigError("BERT has no class with this task's head", hint="leave out --as bert")
    tensors = {bert_name(name): tensor for name, tensor in _kept(model.tensors, theirs).items()}
    kept: dict[str, Any] = {key: value for key, value in config.items() if key not in _ELECTRA_ONLY}
    kept |= {"architectures": [theirs], "model_type": "bert"}
    if MARK in kept:
        kept[MARK] = {key: value for key, value in kept[MARK].items() if key not in _OF_A_RUN} | {"form": "bert"}
    return HuggingFaceModel(kept, tensors)


def _kept(tensors: Mapping[str, Tensor], architecture: str) -> dict[str, Tensor]:
    """The tensors that the architecture has a place for."""
    if architecture != BERT_ENCODER_CLASS or _is_bare(tensors):
        return dict(tensors)
    return {name: each for name, each in tensors.items() if name.startswith("electra.")}


def _is_bare(tensors: Mapping[str, Tensor]) -> bool:
    """Whether these are the weights of an encoder alone, whose names have no prefix."""
    return not any(name.startswith("electra.") for name in tensors)
