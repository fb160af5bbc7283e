"""The network in somebody else's XLNet folder: the language model, or the encoder alone. Nothing here imports transformers."""

from __future__ import annotations

from pathlib import Path

from discern.interop.adopted import Adopted
from discern.interop.stored import stored_weights
from discern.interop.tokenizer import read_max_length
from discern.interop.xlnet import huggingface_names, network_with_head, to_huggingface
from discern.model.network import Network
from discern.objectives.base import Vocabulary


def read_xlnet(folder: Path, vocabulary: Vocabulary) -> Adopted:
    """The network in a folder that save_pretrained() wrote.

    Args:
        vocabulary: of its tokenizer.

    Raises:
        CheckpointError: a file is missing or damaged or could run code, the model has an option that ours has not, or a weight
            is missing, is left over, or has another shape than config.json says.
    """
    network = network_with_head(folder)
    model, sizes = to_huggingface(network, vocabulary), network.encoder.config
    length = read_max_length(folder, sizes.max_positions)
    return Adopted(
        "Hugging Face XLNet", {"encoder": model}, {"encoder": sizes}, max_length=length, left_out=_left_out(folder, network)
    )


def _left_out(folder: Path, network: Network) -> list[str]:
    """Heads of the folder that are of no use here, as that of a task."""
    with stored_weights(folder) as stored:
        others = stored.tensors.keys() - huggingface_names(network, stored)
    return sorted({name.rpartition(".")[0] for name in others})
