"""Checkpoints of the released ELECTRA code, read without TensorFlow: one that TensorFlow wrote, and others that are wrong."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

from discern.errors import CheckpointError, ConfigError
from discern.model_files.huggingface import read_network
from discern.model_files.import_ import ImportedModel, import_model
from discern.model_files.tensorflow import Bundle, find_checkpoint
from discern.progress import Silent
from tests.model_files import tensorflow_checkpoint as written
from tests.model_files.bundle_writer import number, shape_field, write_bundle

FOLDER = Path(__file__).parent / "data" / "electra-tiny"
PREFIX = FOLDER / "model.ckpt-7"
INDEX, DATA = "model.ckpt-7.index", "model.ckpt-7.data-00000-of-00001"
WORDS, BIAS = "electra/embeddings/word_embeddings", "electra/encoder/layer_0/output/dense/bias"
HEAD = "generator_predictions/dense/kernel"
WEIGHTS = {name: written.value(name, shape) for name, shape in written.shapes().items()}
IDS = torch.randint(5, 46, (3, 11), generator=torch.Generator().manual_seed(0))


def read(prefix: Path, **options: Any) -> ImportedModel:
    """What is imported, with the vocabulary of the tiny model."""
    with TemporaryDirectory() as folder:
        options |= {"tokenizer": FOLDER / "vocab.txt", "progress": Silent(), "warn": lambda message: None}
        return import_model([prefix], out=Path(folder, "out"), **options).model


def without(*scopes: str) -> dict[str, np.ndarray]:
    return {name: array for name, array in WEIGHTS.items() if not name.startswith(scopes)}


def like(name: str, *shape: int) -> dict[str, np.ndarray]:
    return {name: written.value(name, shape)}


@pytest.mark.parametrize("shards", [0, 1, 3])
def test_every_array_is_as_it_was_written(shards: int, tmp_path: Path) -> None:
    arrays = written.variables()
    bundle = Bundle.open(write_bundle(tmp_path / "model.ckpt", arrays, shards=shards) if shards else PREFIX)
    assert bundle.entries.keys() == arrays.keys()
    for name, array in arrays.items():
        assert torch.equal(bundle.read(name), torch.from_numpy(array)), name


@pytest.mark.parametrize(("counter", "step"), [([3, 4], None), (9.0, None), (9, 9)])
def test_a_step_is_one_whole_number(counter: Any, step: int | None, tmp_path: Path) -> None:
    array = np.array(counter, np.float32 if isinstance(counter, float) else np.int64)
    assert read(write_bundle(tmp_path / "model.ckpt", WEIGHTS | {"global_step": array})).step == step


def theirs(name: str) -> str:
    """Hugging Face's name of a variable, as its converter for TensorFlow checkpoints had it."""
    name = name.replace("dense_1", "dense_prediction").replace("generator_predictions/output_bias", "generator_lm_head/bias")
    name = re.sub(r"layer_(\d+)", r"layer/\1", re.sub("^generator/", "electra/", name)).replace("/", ".")
    name = re.sub(r"\.(kernel|gamma)$", ".weight", re.sub(r"\.beta$", ".bias", name))
    return f"{name}.weight" if name.endswith("_embeddings") else name


@pytest.mark.parametrize(
    ("network", "scope", "architecture"),
    [("discriminator", "electra", "ElectraForPreTraining"), ("generator", "generator", "ElectraForMaskedLM")],
)
@torch.no_grad()
def test_logits_are_those_of_hugging_face_with_the_same_arrays(
    network: str, scope: str, architecture: str, tmp_path: Path
) -> None:
    import transformers

    config = transformers.ElectraConfig(
        vocab_size=46,
        embedding_size=written.EMBEDDING,
        hidden_size=written.HIDDEN[scope],
        num_hidden_layers=written.LAYERS,
        num_attention_heads=1,
        intermediate_size=4 * written.HIDDEN[scope],
        max_position_embeddings=written.POSITIONS,
    )
    model = getattr(transformers, architecture)(config)
    state = {
        theirs(name): torch.from_numpy(array.T if name.endswith("kernel") else array)
        for name, array in WEIGHTS.items()
        if name.startswith((f"{scope}/", "electra/embeddings/", f"{network}_predictions/"))
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"generator_lm_head.weight"}
    model.tie_weights()
    read(PREFIX).models[network].write(tmp_path)
    ours = read_network(tmp_path).network.token_logits(IDS)
    assert ours.std() > 0.1, "weights that hide nothing"
    torch.testing.assert_close(ours, model.eval()(IDS).logits, atol=1e-5, rtol=0)


def test_heads_are_the_discriminators_and_one_for_64_otherwise() -> None:
    assert [model.sizes.num_heads for model in read(PREFIX, heads=3).models.values()] == [3, 1]
    with pytest.raises(CheckpointError, match="num_heads 5"):
        read(PREFIX, heads=5)


@pytest.mark.parametrize(
    ("arrays", "networks", "architecture"),
    [
        (without("generator"), ["discriminator"], "ElectraForPreTraining"),
        (
            without("electra/enc", "electra/embeddings_project", "discriminator_predictions"),
            ["generator"],
            "ElectraForMaskedLM",
        ),
        # The masked language model that the code also trains: one encoder, its head as wide as its own states asks.
        (without("generator/", "discriminator_predictions") | like(HEAD, 12, 8), ["encoder"], "ElectraForMaskedLM"),
        # untied_generator=False: one encoder with both heads.
        (without("generator/") | like(HEAD, 12, 8), ["discriminator", "generator"], "ElectraForPreTraining"),
        (
            without("generator", "discriminator_predictions") | like("task_specific/cola/logits/kernel", 12, 2),
            ["encoder"],
            "ElectraModel",
        ),
    ],
)
def test_which_networks_there_are(arrays: dict[str, np.ndarray], networks: list[str], architecture: str, tmp_path: Path) -> None:
    found = read(write_bundle(tmp_path / "model.ckpt", arrays))
    assert list(found.models) == networks
    assert found.models[networks[0]].loads_as == architecture
    assert found.step is None
    assert found.left_out == [name for name in arrays if name.startswith("task_specific")]


def test_a_generator_with_embeddings_of_its_own_in_half_precision(tmp_path: Path) -> None:
    narrow = {
        name.replace("electra", "generator"): array[..., :6]
        for name, array in without("generator_predictions/output_bias").items()
        if name.startswith(("electra/embeddings/", "generator_predictions"))
    }
    arrays = without("generator/embeddings_project") | narrow
    half = {name: array.astype(np.float16) for name, array in arrays.items()}
    model = read(write_bundle(tmp_path / "model.ckpt", half)).models["generator"]
    assert model.sizes.embedding_size == 6
    words = torch.from_numpy(half["generator/embeddings/word_embeddings"].astype(np.float32))
    assert torch.equal(model.tensors["electra.embeddings.word_embeddings.weight"], words)


def damaged(folder: Path, name: str, at: int) -> Path:
    """A copy with one bit changed."""
    prefix = shutil.copytree(FOLDER, folder, dirs_exist_ok=True) / PREFIX.name
    content = bytearray((FOLDER / name).read_bytes())
    content[at] ^= 1
    prefix.with_name(name).write_bytes(content)
    return prefix


def test_damage_is_noticed_in_what_is_imported(tmp_path: Path) -> None:
    entries, size = Bundle.open(PREFIX).entries, len((FOLDER / INDEX).read_bytes())
    with pytest.raises(CheckpointError, match=f"damaged.*'{WORDS}'"):
        read(damaged(tmp_path, DATA, entries[WORDS].offset + 5))
    assert read(damaged(tmp_path, DATA, entries[f"{WORDS}/adam_m"].offset)).step == 7
    for at in range(0, size, 37):
        try:
            assert Bundle.open(damaged(tmp_path, INDEX, at)).entries == entries
            assert at > size - 48, "some bytes of the footer are padding"
        except CheckpointError:
            pass


@pytest.mark.parametrize("name", [INDEX, DATA])
@pytest.mark.parametrize("kept", [None, 0, 5000])
def test_an_incomplete_checkpoint_is_refused(name: str, kept: int | None, tmp_path: Path) -> None:
    prefix = shutil.copytree(FOLDER, tmp_path / "copy") / PREFIX.name
    path = prefix.with_name(name)
    content = path.read_bytes()
    path.unlink() if kept is None else path.write_bytes(content[:kept])
    with pytest.raises(CheckpointError, match=name):
        read(prefix.with_name(DATA if name == INDEX else INDEX))


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({name.replace("electra", "bert"): array for name, array in WEIGHTS.items()}, "no ELECTRA.* bert"),
        (WEIGHTS | like("cloze_predictions/dense/bias", 3), "cloze_predictions"),
        (WEIGHTS | like("electra/pooler/dense/bias", 3), "electra/pooler/dense/bias"),
        (without(BIAS), BIAS),
        (without("electra/encoder/layer_0/intermediate"), "layer_0/intermediate/dense/kernel"),
        (WEIGHTS | like(WORDS, 2, 3, 4), WORDS),
        (WEIGHTS | like("discriminator_predictions/dense/kernel", 12, 13), r"dense/kernel.* \[13, 12\], .* \[12, 12\]"),
        (WEIGHTS | like("x" * 4097, 1), "damaged"),
    ],
)
def test_other_variables_are_refused(arrays: dict[str, np.ndarray], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        read(write_bundle(tmp_path / "model.ckpt", arrays))


@pytest.mark.parametrize(
    ("name", "appended", "said"),
    [
        ("", number(2, 1), "little-endian"),
        (WORDS, number(1, 7), "data type 7"),
        # As of a partitioned variable, whose parts have entries of their own
        (WORDS, number(5, 0), f"'{WORDS}' is empty or partitioned"),
        (WORDS, b"\x0b", "data type"),
        (WORDS, shape_field(45, 8), "size"),
        # Shapes and places that no array has
        (BIAS, shape_field(12, *(1,) * 70), "model.ckpt"),
        (WORDS, shape_field(2**64 - 1, 8), "model.ckpt"),
        (WORDS, number(5, 2**62), "model.ckpt"),
        (WORDS, number(4, 2**64 - 1), "model.ckpt"),
    ],
)
def test_other_entries_are_refused(name: str, appended: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        read(write_bundle(tmp_path / "model.ckpt", WEIGHTS, special={name: appended}))


def test_a_compressed_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="compressed"):
        read(write_bundle(tmp_path / "model.ckpt", WEIGHTS, compression=1))


def test_without_checksums_the_package_to_install_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(ConfigError) as caught:
        import_model([FOLDER], out=tmp_path / "out", progress=Silent(), warn=pytest.fail)
    assert "discern-nlp[tensorflow]" in str(caught.value.hint)
    assert not list(tmp_path.iterdir())


def test_what_a_path_means(tmp_path: Path) -> None:
    for name in (INDEX, DATA, PREFIX.name, "model.ckpt-7.meta", ""):
        assert find_checkpoint(FOLDER / name) == PREFIX
    assert find_checkpoint(FOLDER / "vocab.txt") is None
    for name in (".index", ".data-00000-of-00001"):
        (tmp_path / name).touch()
    for name in ("absent.index", "absent", ".index", ".data-00000-of-00001", ""):
        assert find_checkpoint(tmp_path / name) is None, name
    # Part of one is there, so what is missing is to be told.
    shutil.copy(FOLDER / DATA, tmp_path)
    assert find_checkpoint(tmp_path / DATA) == tmp_path / PREFIX.name


def test_of_several_checkpoints_one_is_to_be_named(tmp_path: Path) -> None:
    for step in (3, 40):
        write_bundle(tmp_path / f"model.ckpt-{step}", {})
    with pytest.raises(CheckpointError, match=r"2 checkpoints .*model\.ckpt-40"):
        find_checkpoint(tmp_path)
    assert find_checkpoint(tmp_path / "model.ckpt-3") == tmp_path / "model.ckpt-3"
