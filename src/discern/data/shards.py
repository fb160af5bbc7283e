"""A data set on disk, for reading: token shards with indices of documents, sentences and words.

DATA/ holds `manifest.json`, `tokenizer.json`, the counts per token id, and for every shard four flat little-endian files:
`.tokens` (uint16 or uint32 ids, without special tokens), `.documents` and `.sentences` (int64 starts within the shard,
closed by the shard's number of tokens) and `.words` (one bit a token, first token in the highest bit, 1 = a word begins).
A document lies wholly in one shard. Nothing here fixes a sequence length, a masking or a batch size.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Int

from discern.data.manifest import COUNTS_NAME, TOKENIZER_NAME, Manifest, ShardInfo, SplitInfo, SplitName, read_manifest
from discern.errors import DataError

if TYPE_CHECKING:
    import tokenizers

    import discern.types


class Shard:
    """One shard, mapped into memory when first touched.

    Attributes:
        info: the shard's entry in the manifest.
        first_token: offset of its first token within the split.
    """

    def __init__(self, folder: Path, info: ShardInfo, dtype: np.dtype, first_token: int) -> None:
        self.info = info
        self.first_token = first_token
        self._folder = folder
        self._dtype = dtype

    @cached_property
    def tokens(self) -> np.memmap:
        """(T,) token ids."""
        return self._map("tokens", self._dtype)

    @cached_property
    def document_starts(self) -> Int[np.ndarray, " bounds"]:
        """(D+1,) where each document begins, then the number of tokens; relative to the shard."""
        return self._map("documents", np.dtype("<i8"))

    @cached_property
    def sentence_starts(self) -> Int[np.ndarray, " bounds"]:
        """(S+1,) where each sentence begins, then the number of tokens; relative to the shard."""
        return self._map("sentences", np.dtype("<i8"))

    def word_starts(self, start: int, stop: int) -> Bool[np.ndarray, " n"]:
        """True where a word begins, for tokens `start` to `stop` of the shard."""
        bits = np.unpackbits(self._word_bits[start // 8 : (stop + 7) // 8])
        first = start % 8
        return bits[first : first + stop - start].astype(bool)

    @cached_property
    def _word_bits(self) -> np.memmap:
        return self._map("words", np.dtype("u1"))

    def _map(self, suffix: str, dtype: np.dtype) -> np.memmap:
        return np.memmap(self._folder / f"{self.info.name}.{suffix}", dtype=dtype, mode="r")

    def __getstate__(self) -> dict[str, object]:
        # A memory map pickles as a copy of its content; the other process maps the file itself.
        return {key: value for key, value in vars(self).items() if not isinstance(value, np.memmap)}


class TokenSplit:
    """The tokens of `train` or `heldout` as one long array over its shards.

    Attributes:
        num_tokens: tokens in the split.
        num_documents: documents in the split.
        shards: the shards in order.
    """

    def __init__(self, folder: Path, info: SplitInfo, dtype: np.dtype) -> None:
        self.num_tokens = info.num_tokens
        self.num_documents = info.num_documents
        firsts = np.cumsum([0] + [shard.num_tokens for shard in info.shards])
        self.shards = [Shard(folder, shard, dtype, int(first)) for shard, first in zip(info.shards, firsts, strict=False)]
        self._bounds: Int[np.ndarray, " bounds"] = firsts

    def read(self, start: int, stop: int) -> Int[np.ndarray, " n"]:
        """Token ids `start` to `stop` of the split, int64; may cross shards.

        Raises:
            IndexError: the range does not lie within the split.
        """
        parts = [shard.tokens[first:last].astype(np.int64) for shard, first, last in self._pieces(start, stop)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def word_starts(self, start: int, stop: int) -> Bool[np.ndarray, " n"]:
        """True where a word begins, for tokens `start` to `stop` of the split.

        Raises:
            IndexError: the range does not lie within the split.
        """
        parts = [shard.word_starts(first, last) for shard, first, last in self._pieces(start, stop)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=bool)

    def _pieces(self, start: int, stop: int) -> list[tuple[Shard, int, int]]:
        """The shards that tokens `start` to `stop` touch, with the range within each."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start} to {stop} of a split of {self.num_tokens}")
        index = int(np.searchsorted(self._bounds, start, side="right")) - 1
        pieces = []
        while start < stop:
            shard, end = self.shards[index], min(stop, int(self._bounds[index + 1]))
            pieces.append((shard, start - shard.first_token, end - shard.first_token))
            start, index = end, index + 1
        return pieces


class TokenData:
    """A prepared data set. Open one with `TokenData.open`.

    Attributes:
        folder: where it lies.
        manifest: what it says of itself.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._splits: dict[str, TokenSplit] = {}

    @classmethod
    def open(cls, folder: Path) -> TokenData:
        """The data set in `folder`; checks the size of every file, reads none of them.

        Raises:
            DataError: not a data set, another format version, or a file that is missing or cut short.
        """
        manifest = read_manifest(folder)
        expected = {COUNTS_NAME: manifest.token_counts.size}
        for split in manifest.splits.values():
            for shard in split.shards:
                expected |= {f"{shard.name}.{suffix}": file.size for suffix, file in shard.files.items()}
        for name, size in expected.items():
            found = (folder / name).stat().st_size if (folder / name).is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes"
                raise DataError(
                    f"{folder / name} {state}, but the manifest says {size} bytes",
                    hint="the data set is damaged: run the same `discern prepare` again with --overwrite",
                )
        if not (folder / TOKENIZER_NAME).is_file():
            raise DataError(f"{folder / TOKENIZER_NAME} is missing", hint="copy it back, or prepare the data again")
        return cls(folder, manifest)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer can give: the largest plus one."""
        return self.manifest.tokenizer.vocab_size

    @property
    def tokenizer_fingerprint(self) -> str:
        """Hash of what decides the ids."""
        return self.manifest.tokenizer.fingerprint

    @property
    def fingerprint(self) -> str:
        """Hash of the whole data set: its tokenizer and its shards."""
        return self.manifest.fingerprint

    @property
    def special_tokens(self) -> discern.types.SpecialTokens:
        """Ids of [PAD], [UNK], [CLS], [SEP] and [MASK]."""
        from discern.types import SpecialTokens  # torch comes with it

        return SpecialTokens(**self.manifest.tokenizer.special_tokens)

    def split(self, name: SplitName) -> TokenSplit:
        """The tokens of `train` or `heldout`."""
        if name not in self._splits:
            dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
            self._splits[name] = TokenSplit(self.folder, self.manifest.splits[name], dtype)
        return self._splits[name]

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer that made the ids.

        Raises:
            DataError: tokenizer.json is not the one that the manifest names.
        """
        from discern.data.tokenizer import fingerprint, load_tokenizer

        tokenizer = load_tokenizer(self.folder / TOKENIZER_NAME)
        found = fingerprint(tokenizer)
        if found != self.tokenizer_fingerprint:
            raise DataError(
                f"{self.folder / TOKENIZER_NAME} has fingerprint {found[:12]}, but the shards were made with "
                f"{self.tokenizer_fingerprint[:12]}",
                hint="put the original tokenizer.json back, or prepare the data again with this one",
            )
        return tokenizer

    def token_counts(self) -> Int[np.ndarray, " V"]:
        """(V,) how often each id occurs in the train split."""
        return np.fromfile(self.folder / COUNTS_NAME, dtype="<i8").astype(np.int64)
