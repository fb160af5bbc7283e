"""A tiny checkpoint as the released ELECTRA code leaves it: names and shapes of its variables, Adam's slots, values.

`python tests/model_files/tensorflow_checkpoint.py tests/model_files/data/electra-tiny` writes it with TensorFlow; what it wrote
is kept there. The values follow from the names, so that tests need no reader to know them.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import numpy as np

_WORDS = "the a old red cat dog sat ran on mat ##s ##ed naive über ."
VOCABULARY = [*"[PAD] [UNK] [CLS] [SEP] [MASK]".split(), *_WORDS.split(), *"abcdefghijklmnopqrstuvwxyz"]
POSITIONS, TYPES, EMBEDDING, LAYERS = 24, 2, 8, 2
HIDDEN = {"electra": 12, "generator": 6}
STEP = 7


def shapes() -> dict[str, tuple[int, ...]]:
    """The trained variables. Kernels are (in, out)."""
    found: dict[str, tuple[int, ...]] = {
        "electra/embeddings/word_embeddings": (len(VOCABULARY), EMBEDDING),
        "electra/embeddings/token_type_embeddings": (TYPES, EMBEDDING),
        "electra/embeddings/position_embeddings": (POSITIONS, EMBEDDING),
    } | _norm("electra/embeddings", EMBEDDING)
    for scope, width in HIDDEN.items():
        found |= _dense(f"{scope}/embeddings_project", EMBEDDING, width)
        for layer in range(LAYERS):
            block = f"{scope}/encoder/layer_{layer}"
            for part in ("query", "key", "value"):
                found |= _dense(f"{block}/attention/self/{part}", width, width)
            found |= _dense(f"{block}/attention/output/dense", width, width) | _norm(f"{block}/attention/output", width)
            found |= _dense(f"{block}/intermediate/dense", width, 4 * width)
            found |= _dense(f"{block}/output/dense", 4 * width, width) | _norm(f"{block}/output", width)
    found |= _dense("generator_predictions/dense", HIDDEN["generator"], EMBEDDING) | _norm("generator_predictions", EMBEDDING)
    found |= {"generator_predictions/output_bias": (len(VOCABULARY),)}
    found |= _dense("discriminator_predictions/dense", HIDDEN["electra"], HIDDEN["electra"])
    return found | _dense("discriminator_predictions/dense_1", HIDDEN["electra"], 1)


def value(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A variable's values: noise that its name seeds, around one for the factors of a LayerNorm."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    return (1 + 0.3 * noise if name.endswith("gamma") else 0.4 * noise).astype(np.float32)


def variables() -> dict[str, np.ndarray]:
    """All that the checkpoint holds, by name."""
    found = shapes()
    found |= {f"{name}/{slot}": shape for name, shape in found.items() for slot in ("adam_m", "adam_v")}
    return {name: value(name, shape) for name, shape in found.items()} | {"global_step": np.array(STEP, np.int64)}


def write(folder: Path) -> None:
    """Let TensorFlow write the checkpoint, and the vocabulary beside it."""
    import tensorflow as tf

    folder.mkdir(parents=True, exist_ok=True)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        made = [tf.compat.v1.get_variable(name, initializer=array, use_resource=False) for name, array in variables().items()]
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver(made).save(session, str(folder / "model.ckpt"), global_step=STEP, write_meta_graph=False)
    (folder / "vocab.txt").write_text("".join(f"{entry}\n" for entry in VOCABULARY), encoding="utf-8")


def _dense(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}/kernel": (inputs, outputs), f"{name}/bias": (outputs,)}


def _norm(scope: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{scope}/LayerNorm/gamma": (width,), f"{scope}/LayerNorm/beta": (width,)}


if __name__ == "__main__":
    write(Path(sys.argv[1]))
