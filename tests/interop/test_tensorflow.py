"""Checkpoints of the released ELECTRA code, read without TensorFlow: one that TensorFlow wrote, and others that are wrong."""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from discern.errors import CheckpointError
from discern.interop.imported_model import ImportedModel
from discern.interop.tensorflow.bundle import Bundle, Slice, find_checkpoint
from discern.interop.tensorflow.electra import read_released
from discern.interop.tensorflow.sstable import checksum, read_table, unmasked
from discern.objectives.base import Vocabulary
from discern.progress import Silent
from discern.types import SpecialTokens
from tests.interop import tensorflow_checkpoint as written
from tests.interop.bundle_writer import Piece, entry, masked, message, number, slice_key, table, whole, write_bundle

FOLDER = Path(__file__).parent / "data" / "electra-tiny"
PREFIX = FOLDER / "model.ckpt-7"
INDEX, DATA = "model.ckpt-7.index", "model.ckpt-7.data-00000-of-00001"
VOCABULARY = Vocabulary(len(written.VOCABULARY), SpecialTokens(pad=0, unk=1, cls=2, sep=3, mask=4))
WORDS = "electra/embeddings/word_embeddings"
IDS = torch.randint(5, VOCABULARY.size, (3, 11), generator=torch.Generator().manual_seed(0))


def read(prefix: Path, heads: int | None = None) -> ImportedModel:
    return read_released(prefix, VOCABULARY, heads, Silent())


def weights() -> dict[str, np.ndarray]:
    """The trained variables alone."""
    return {name: written.value(name, shape) for name, shape in written.shapes().items()}


def test_every_array_is_as_it_was_written() -> None:
    bundle, arrays = Bundle.open(PREFIX), written.variables()
    assert bundle.entries.keys() == arrays.keys()
    for name, array in arrays.items():
        assert torch.equal(bundle.read(name), torch.from_numpy(array)), name
    assert [name for name, _ in bundle.verified()] == sorted(arrays)


def theirs(name: str) -> str:
    """Hugging Face's name of a variable, as its converter for TensorFlow checkpoints had it."""
    name = name.replace("dense_1", "dense_prediction").replace("generator_predictions/output_bias", "generator_lm_head/bias")
    name = re.sub(r"layer_(\d+)", r"layer/\1", name).replace("/", ".")
    for old, new in (("kernel", "weight"), ("gamma", "weight"), ("beta", "bias")):
        name = re.sub(rf"\.{old}$", f".{new}", name)
    return f"{name}.weight" if name.endswith("_embeddings") else name


def their_model(network: str) -> Any:
    """Hugging Face's model with the arrays assigned by name."""
    from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

    scope = "electra" if network == "discriminator" else "generator"
    config = ElectraConfig(
        vocab_size=VOCABULARY.size,
        embedding_size=written.EMBEDDING,
        hidden_size=written.HIDDEN[scope],
        num_hidden_layers=written.LAYERS,
        num_attention_heads=1,
        intermediate_size=4 * written.HIDDEN[scope],
        max_position_embeddings=written.POSITIONS,
    )
    model = (ElectraForPreTraining if network == "discriminator" else ElectraForMaskedLM)(config)
    state: dict[str, Tensor] = {}
    for name, array in weights().items():
        if name.startswith((f"{scope}/", "electra/embeddings/", f"{network}_predictions/")):
            tensor = torch.from_numpy(array)
            state[theirs(re.sub(r"^generator/", "electra/", name))] = tensor.t() if name.endswith("kernel") else tensor
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert not [name for name in missing if name != "generator_lm_head.weight" and not name.endswith("position_ids")]
    model.tie_weights()
    return model.eval()


@pytest.mark.parametrize("network", ["discriminator", "generator"])
@torch.no_grad()
def test_logits_are_those_of_hugging_face_with_the_same_arrays(network: str, tmp_path: Path) -> None:
    from discern.interop.huggingface import network_from_huggingface

    adopted = read(PREFIX)
    adopted.models[network].write(tmp_path)
    ours = network_from_huggingface(tmp_path).token_logits(IDS)
    assert ours.std() > 0.1, "weights that hide nothing"
    torch.testing.assert_close(ours, their_model(network)(IDS).logits, atol=1e-5, rtol=0)


def test_what_a_checkpoint_tells() -> None:
    adopted = read(PREFIX)
    assert list(adopted.models) == ["discriminator", "generator"]
    assert adopted.step == written.STEP
    assert adopted.left_out == ["Adam's slots"]
    assert "--heads" in adopted.remarks[0]
    sizes = adopted.sizes["discriminator"]
    assert (sizes.num_layers, sizes.hidden_size, sizes.embedding_size) == (2, 12, 8)
    assert (sizes.num_heads, sizes.feedforward_size, sizes.max_positions) == (1, 48, 24)
    assert adopted.sizes["generator"].hidden_size == 6


def test_heads_are_the_discriminators_and_one_for_64_otherwise(tmp_path: Path) -> None:
    assert read(PREFIX, heads=3).sizes["discriminator"].num_heads == 3
    assert read(PREFIX, heads=3).sizes["generator"].num_heads == 1
    assert not read(PREFIX, heads=3).remarks
    with pytest.raises(CheckpointError, match="hidden_size 12 is not a multiple of num_heads 5") as caught:
        read(PREFIX, heads=5)
    assert "--heads N" in str(caught.value)


def without(*scopes: str) -> dict[str, np.ndarray]:
    return {name: array for name, array in weights().items() if not name.startswith(scopes)}


def renamed(old: str, new: str) -> dict[str, np.ndarray]:
    return {re.sub(f"^{old}", new, name): array for name, array in weights().items()}


@pytest.mark.parametrize(
    ("arrays", "networks", "architecture"),
    [
        (without("generator"), ["discriminator"], "ElectraForPreTraining"),
        (without("generator", "discriminator_predictions"), ["encoder"], "ElectraModel"),
        (without("electra/enc", "electra/embeddings_project", "discriminator_predictions"), ["generator"], "ElectraForMaskedLM"),
        # The masked language model that the code also trains: one encoder, its head as wide as its own states asks.
        (
            without("generator/", "generator_predictions/dense/kernel", "discriminator_predictions")
            | {"generator_predictions/dense/kernel": written.value("x", (12, 8))},
            ["encoder"],
            "ElectraForMaskedLM",
        ),
        # untied_generator=False: one encoder with both heads.
        (
            without("generator/", "generator_predictions/dense/kernel")
            | {"generator_predictions/dense/kernel": written.value("x", (12, 8))},
            ["discriminator", "generator"],
            "ElectraForPreTraining",
        ),
        (
            without("generator", "discriminator_predictions") | {"task_specific/cola/logits/kernel": written.value("x", (12, 2))},
            ["encoder"],
            "ElectraModel",
        ),
    ],
    ids=["discriminator", "bare encoder", "generator", "masked language model", "all weights shared", "fine-tuned"],
)
def test_which_networks_there_are(arrays: dict[str, np.ndarray], networks: list[str], architecture: str, tmp_path: Path) -> None:
    adopted = read(write_bundle(tmp_path / "model.ckpt", arrays))
    assert list(adopted.models) == networks
    assert adopted.models[networks[0]].config["architectures"] == [architecture]
    assert adopted.step is None
    assert adopted.left_out == [name for name in arrays if name.startswith("task_specific")]


def test_a_generator_with_embeddings_of_its_own(tmp_path: Path) -> None:
    arrays = without("generator/embeddings_project", "generator_predictions")
    shapes = {name.replace("electra", "generator"): array.shape for name, array in arrays.items() if "/embeddings/" in name}
    own = {name: written.value(name, (*shape[:-1], 6)) for name, shape in shapes.items()}
    head = {"dense/kernel": (6, 6), "dense/bias": (6,), "LayerNorm/gamma": (6,), "LayerNorm/beta": (6,), "output_bias": (46,)}
    own |= {f"generator_predictions/{name}": written.value(name, shape) for name, shape in head.items()}
    adopted = read(write_bundle(tmp_path / "model.ckpt", arrays | own))
    assert adopted.sizes["generator"].embedding_size == 6
    table = adopted.models["generator"].tensors["electra.embeddings.word_embeddings.weight"]
    assert torch.equal(table, torch.from_numpy(own["generator/embeddings/word_embeddings"]))


def test_half_precision_becomes_float32(tmp_path: Path) -> None:
    half = {name: array.astype(np.float16) for name, array in without("generator").items()}
    tensors = read(write_bundle(tmp_path / "model.ckpt", half)).models["discriminator"].tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert torch.equal(tensors["electra.embeddings.word_embeddings.weight"], torch.from_numpy(half[WORDS].astype(np.float32)))


def copied(folder: Path, change: Callable[[bytes], bytes] | None = None, name: str = DATA) -> Path:
    """The checkpoint with one of its files changed, or (None) missing."""
    shutil.copytree(FOLDER, folder)
    (folder / name).write_bytes(change((FOLDER / name).read_bytes())) if change else (folder / name).unlink()
    return folder / PREFIX.name


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def of_slot(data: bytes) -> bytes:
    """A byte of Adam's is wrong: not taken, but then who knows of the rest?"""
    entry = Bundle.open(PREFIX).entries[f"{WORDS}/adam_m"]
    return flipped(entry.offset + 5)(data)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (DATA, lambda data: data[:-1], r"data-00000-of-00001 is truncated: it has 69,955 bytes, and the index requires 69,956"),
        (DATA, lambda data: b"", r"truncated: it has 0 bytes"),
        (
            DATA,
            flipped(0),
            r"damaged: 'discriminator_predictions/dense/bias' has checksum [0-9a-f]{8}, expected [0-9a-f]{8}",
        ),
        (DATA, of_slot, f"damaged: '{WORDS}/adam_m' has checksum"),
        (DATA, None, "data-00000-of-00001 is missing"),
        (INDEX, lambda data: data[:-20], "does not end as the index of a TensorFlow checkpoint does"),
        (INDEX, lambda data: data[: len(data) // 2], "does not end as"),
        (INDEX, lambda data: b"", r"\(0 bytes\) does not end"),
        (INDEX, flipped(100), "is damaged: the block at byte 0 has checksum"),
        (INDEX, lambda data: data[:-48] + b"\xff" * 40 + data[-8:], "is damaged: "),
        (
            INDEX,
            lambda data: data[:-48] + b"\x00\x00\xf0\xff\x7f\xf0\xff\x7f".ljust(40, b"\0") + data[-8:],
            "extends beyond the end",
        ),
        (INDEX, None, "cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_refused(name: str, change: Callable[[bytes], bytes] | None, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        read(copied(tmp_path / "copy", change, name))
    assert "copy or download the checkpoint again" in str(caught.value)


def test_every_flipped_byte_of_the_index_is_refused(tmp_path: Path) -> None:
    """Or changes nothing: some bytes of the footer are padding."""
    prefix = copied(tmp_path / "copy", flipped(0), INDEX)
    content = (FOLDER / INDEX).read_bytes()
    entries = Bundle.open(PREFIX).entries
    for at in range(0, len(content), 37):
        prefix.with_name(INDEX).write_bytes(flipped(at)(content))
        try:
            assert Bundle.open(prefix).entries == entries
            assert at > len(content) - 48
        except CheckpointError:
            pass


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (renamed("electra", "bert"), "contains no ELECTRA: its variables are in the scopes bert, discriminator_predictions"),
        (
            {"layer-1/kernel/.ATTRIBUTES/VARIABLE_VALUE": np.zeros(3, np.float32)},
            "an object-based checkpoint of TensorFlow 2",
        ),
        (weights() | {"cloze_predictions/dense/bias": np.zeros(3, np.float32)}, "a two-tower generator"),
        (weights() | {"electra/pooler/dense/bias": np.zeros(3, np.float32)}, "unexpected tensor 'electra/pooler/dense/bias'"),
        (without("electra/encoder/layer_1/output/dense/bias"), r"'electra\.encoder\.layer\.1\.output\.dense\.bias' is missing"),
        (without("electra/encoder/layer_0/intermediate"), "'electra/encoder/layer_0/intermediate/dense/kernel' is missing"),
        (weights() | {WORDS: np.zeros((2, 3, 4), np.float32)}, r"word_embeddings' has shape \[2, 3, 4\], expected a matrix"),
        (
            weights() | {"discriminator_predictions/dense/kernel": np.zeros((12, 13), np.float32)},
            r"'discriminator_predictions\.dense\.weight' has shape \[13, 12\], but the other weights require \[12, 12\]",
        ),
        (weights() | {WORDS: np.zeros((46, 8), np.int32)}, "has data type int32, expected floating point"),
    ],
)
def test_other_variables_are_refused(arrays: dict[str, np.ndarray], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        read(write_bundle(tmp_path / "model.ckpt", arrays))


def test_other_forms_of_the_format_are_refused(tmp_path: Path) -> None:
    arrays = weights()
    with pytest.raises(CheckpointError, match="compressed with Snappy, which discern does not support"):
        read(write_bundle(tmp_path / "a", arrays, compression=1))
    with pytest.raises(CheckpointError, match="has the unknown compression type"):
        read(write_bundle(tmp_path / "b", arrays, compression=9))
    with pytest.raises(CheckpointError, match="big-endian"):
        read(write_bundle(tmp_path / "c", arrays, header=number(1, 1) + number(2, 1)))
    with pytest.raises(CheckpointError, match="does not state the number of data files"):
        read(write_bundle(tmp_path / "d", arrays, header=b""))
    with pytest.raises(CheckpointError, match=r"TensorFlow's data type 7, which is not a supported number type"):
        read(write_bundle(tmp_path / "f", arrays, special={WORDS: number(1, 7)}))
    with pytest.raises(CheckpointError, match="which does not match its shape"):
        read(
            write_bundle(
                tmp_path / "g", arrays, special={WORDS: message(2, message(2, number(1, 45)) + message(2, number(1, 8)))}
            )
        )
    with pytest.raises(CheckpointError, match=r"is damaged: a field has the unknown wire type 3"):
        read(write_bundle(tmp_path / "h", arrays, special={WORDS: b"\x0b"}))


KERNEL = "electra/encoder/layer_0/intermediate/dense/kernel"  # (12, 48)
PARTITIONS: dict[str, list[Piece]] = {
    # As a fixed-size partitioner cuts 46 rows into three, and as one along the second axis does; each with all of the other.
    WORDS: [((0, 16), (0, 8)), ((16, 15), (0, 8)), ((31, 15), (0, 8))],
    KERNEL: [(None, (0, 20)), (None, (20, 28))],
}


@pytest.mark.parametrize("shards", [1, 3])
def test_a_partitioned_variable_is_put_together(shards: int, tmp_path: Path) -> None:
    prefix = write_bundle(tmp_path / "model.ckpt", weights(), partitions=PARTITIONS, shards=shards)
    bundle, plain = Bundle.open(prefix), Bundle.open(write_bundle(tmp_path / "plain", weights()))
    assert bundle.entries.keys() == plain.entries.keys()
    for name, array in weights().items():
        assert torch.equal(bundle.read(name), torch.from_numpy(array)), name
    assert sum(entry.size for _, entry in bundle.verified()) == sum(entry.size for entry in plain.entries.values())
    for name, model in read(prefix).models.items():
        torch.testing.assert_close(model.tensors, read(tmp_path / "plain").models[name].tensors, rtol=0, atol=0)


def test_the_keys_of_parts_are_those_of_tensorflow() -> None:
    """Ordered code: lengths in the leading bits, numbers below zero flipped, so that bytes sort as values do."""
    assert Slice((0, 0), (5, -1)).key("a/b") == b"\0a/b\0\1\1\2\x80\x85\x80\x7f"
    assert Slice((300,), (8192,)).key("w") == b"\0w\0\1\1\1\xc1\x2c\xe0\x20\x00"
    numbers = [-1, 0, 1, 63, 64, 8191, 8192, 2**20, 2**27 - 1, 2**34, 2**41, 2**48, 2**55, 2**62, 2**63 - 1]
    keys = [Slice((each,), (0,)).key("w") for each in numbers]
    assert keys == sorted(keys)
    assert [len(key) - len(keys[1]) for key in keys] == [0, 0, 0, 0, 1, 1, 2, 3, 3, 5, 6, 7, 8, 9, 9]


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([(None,)], "a part has 1 axes, and its array has 2"),
        ([((0, 47), None)], "a part extends from 0 to 47 along an axis of length 46"),
        ([((0, 16), None)], r"the parts of 'electra/embeddings/word_embeddings' do not add up to shape \[46, 8\]"),
        ([((0, 23), None), ((0, 23), (0, 8))], "overlap and do not cover all of it"),
    ],
)
def test_parts_that_do_not_make_up_the_array_are_refused(pieces: list[Piece], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        read(write_bundle(tmp_path / "model.ckpt", weights(), partitions={WORDS: pieces}))


def test_damaged_parts_are_refused(tmp_path: Path) -> None:
    prefix = write_bundle(tmp_path / "model.ckpt", weights(), partitions=PARTITIONS)
    data, index = (prefix.with_name(f"{prefix.name}.{suffix}") for suffix in ("data-00000-of-00001", "index"))
    content, entries = data.read_bytes(), read_table(index)
    part = Bundle.open(prefix).entries[WORDS].parts[1]
    data.write_bytes(flipped(part.offset)(content))
    with pytest.raises(CheckpointError, match=f"damaged: '{WORDS}' has checksum"):
        read(prefix)
    data.write_bytes(content)
    key = slice_key(WORDS, PARTITIONS[WORDS][1])
    index.write_bytes(table({other: entry for other, entry in entries.items() if other != key}))
    with pytest.raises(CheckpointError, match=r"is partitioned, and its part \[16:31, 0:8\] is missing"):
        read(prefix)
    index.write_bytes(table({key: entry for key, entry in entries.items() if key != WORDS.encode()}))
    with pytest.raises(CheckpointError, match="belongs to no variable"):
        read(prefix)
    index.write_bytes(table(entries | {key: entries[slice_key(WORDS, PARTITIONS[WORDS][0])]}))
    with pytest.raises(CheckpointError, match=r"its part \[16:31, 0:8\] has shape \[16, 8\], expected \[15, 8\]"):
        read(prefix)


def test_a_shape_that_the_parts_do_not_fill_takes_no_memory(tmp_path: Path) -> None:
    """Of 2^31 by 2^31 numbers, of which four are there."""
    prefix = write_bundle(tmp_path / "model.ckpt", weights(), partitions={WORDS: [((0, 2), (0, 2))]})
    index = prefix.with_name(f"{prefix.name}.index")
    shape = message(2, b"".join(message(2, number(1, 2**31 - 1)) for _ in range(2)))
    entries = read_table(index)
    index.write_bytes(table(entries | {WORDS.encode(): entries[WORDS.encode()] + shape}))
    with pytest.raises(CheckpointError, match="do not add up to shape"):
        Bundle.open(prefix).read(WORDS)


def test_parts_that_share_their_bytes_take_no_memory_either(tmp_path: Path) -> None:
    """A thousand parts that all claim the same bytes of a small file."""
    row, name = np.zeros((1, 8), np.float32), "electra/embeddings/word_embeddings"
    prefix = write_bundle(tmp_path / "model.ckpt", {"x": row})
    index = prefix.with_name(f"{prefix.name}.index")
    pieces: list[Piece] = [((start, 1), None) for start in range(1000)]
    entries = read_table(index) | {slice_key(name, piece): entry(row, 0) for piece in pieces}
    index.write_bytes(table(entries | {name.encode(): whole(np.zeros((1000, 8), np.float32), pieces)}))
    with pytest.raises(CheckpointError, match=r"do not add up to shape \[1000, 8\]"):
        Bundle.open(prefix).read(name)


@pytest.mark.parametrize(("length", "refused"), [(4096, False), (4097, True)])
def test_names_are_of_bounded_length(length: int, refused: bool, tmp_path: Path) -> None:
    """A key states how much of the one before it begins with: a few bytes each can stand for a long one."""
    path = tmp_path / "model.ckpt.index"
    keys = [b"x" * (length - 1) + bytes([last]) for last in range(50)]
    path.write_bytes(table({b"": number(1, 1)} | dict.fromkeys(keys, b"")))
    if refused:
        with pytest.raises(CheckpointError, match=r"is damaged: a name has 4,097 bytes, expected at most 4,096"):
            read_table(path)
    else:
        assert list(read_table(path)) == [b"", *keys]


def test_a_block_is_named_once(tmp_path: Path) -> None:
    """Or a few bytes each could have a large one read again and again."""
    path = tmp_path / "model.ckpt.index"
    path.write_bytes(table({b"": number(1, 1), b"x": b""}, times=2))
    with pytest.raises(CheckpointError, match="is damaged: its blocks overlap or are out of order"):
        read_table(path)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (np.array(9, np.int32), 9),
        (np.array([9], np.int64), 9),
        (np.zeros(2, np.int64), None),
        (np.zeros(0, np.int64), None),
        (np.array(9.5, np.float32), None),
    ],
)
def test_a_step_is_one_whole_number(step: np.ndarray, expected: int | None, tmp_path: Path) -> None:
    assert read(write_bundle(tmp_path / "model.ckpt", weights() | {"global_step": step})).step == expected


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((2**63, 0), r"is damaged: an array has 9,223,372,036,854,775,808 elements along one axis"),
        ((2**64 - 1,), "is damaged: an array has 18,446,744,073,709,551,615 elements along one axis"),
        ((2**31,), "is damaged: an array has 2,147,483,648 elements along one axis"),
        ((1,) * 65, "is damaged: an array has 65 axes"),
    ],
)
def test_a_shape_that_no_array_has_is_refused(shape: tuple[int, ...], said: str, tmp_path: Path) -> None:
    stated = message(2, b"".join(message(2, number(1, size)) for size in shape))
    with pytest.raises(CheckpointError, match=said):
        read(write_bundle(tmp_path / "model.ckpt", weights(), special={WORDS: stated}))


def test_a_large_number_is_read_whole() -> None:
    from discern.interop.tensorflow.sstable import MalformedError, fields, read_varint

    assert read_varint(b"\xff" * 9 + b"\x01", 0) == (2**64 - 1, 10)
    assert list(fields(b"\x35" + struct.pack("<I", 7) + b"\x39" + struct.pack("<Q", 9))) == [(6, 7), (7, 9)]
    for wrong in (b"\x80", b"\x80" * 11, b"\x0a\x05abc"):
        with pytest.raises(MalformedError):
            list(fields(b"\x08" + wrong if wrong[0] == 0x80 else wrong))


def test_what_a_path_means(tmp_path: Path) -> None:
    for name in (INDEX, DATA, PREFIX.name, "model.ckpt-7.meta"):
        assert find_checkpoint(FOLDER / name) == PREFIX
    assert find_checkpoint(FOLDER) == PREFIX
    assert find_checkpoint(FOLDER / "vocab.txt") is None
    assert find_checkpoint(tmp_path) is None
    for step in (3, 40):
        write_bundle(tmp_path / f"model.ckpt-{step}", {"global_step": np.array(step)})
    with pytest.raises(CheckpointError, match=r"2 checkpoints \(model\.ckpt-3, \.\.\., model\.ckpt-40\)"):
        find_checkpoint(tmp_path)
    # As it was on the machine that wrote it.
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "gs://bucket/models/model.ckpt-3"\n')
    assert find_checkpoint(tmp_path) == tmp_path / "model.ckpt-3"


def test_a_path_that_does_not_exist_means_no_checkpoint(tmp_path: Path) -> None:
    for name in ("absent.index", "absent.data-00000-of-00001", "absent", ".index"):
        assert find_checkpoint(tmp_path / name) is None, name
    for name in (".index", ".data-00000-of-00001"):
        (tmp_path / name).touch()
        assert find_checkpoint(tmp_path / name) is None, name
    assert find_checkpoint(tmp_path) is None
    # Part of one is there, so what is missing is to be told.
    shutil.copy(FOLDER / DATA, tmp_path)
    assert find_checkpoint(tmp_path / DATA) == tmp_path / PREFIX.name


@pytest.mark.parametrize("named", ["", "/", "gs://bucket/models/", "..", "x\0y"])
def test_a_newest_without_a_name_is_none(named: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text(f'model_checkpoint_path: "{named}"\n')
    assert find_checkpoint(tmp_path) is None
    prefix = write_bundle(tmp_path / "model.ckpt-3", {"global_step": np.array(3)})
    assert find_checkpoint(tmp_path) == prefix


def test_what_tensorflow_writes_now(tmp_path: Path) -> None:
    """Where it is installed: a fresh checkpoint, in one file and in several."""
    pytest.importorskip("tensorflow")
    arrays = written.variables()
    for shards in (1, 3):
        written.write(tmp_path / str(shards), arrays, shards)
        bundle = Bundle.open(tmp_path / str(shards) / PREFIX.name)
        assert bundle.num_shards == shards
        assert bundle.entries.keys() == arrays.keys()
        for name, array in arrays.items():
            assert torch.equal(bundle.read(name), torch.from_numpy(array)), name


@pytest.mark.parametrize(("data", "expected"), [(b"123456789", 0xE3069283), (bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)])
def test_the_checksum_is_crc32c(data: bytes, expected: int) -> None:
    """The check value of every catalog of CRCs, and two of RFC 3720, appendix B.4."""
    assert checksum(data) == expected
    assert unmasked(masked(expected)) == expected
    assert masked(expected) != expected
