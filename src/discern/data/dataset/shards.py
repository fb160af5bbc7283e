"""Reads a data set: token shards with indices of documents, sentences and words.

DATA/ contains `manifest.json`, `tokenizer.json`, the counts per token id, and four flat little-endian files per shard:
`.tokens` (uint16 or uint32 ids, without special tokens), `.documents` and `.sentences` (int64 starts within the shard,
followed by the number of tokens in the shard) and `.words` (one bit per token, first token in the highest bit, 1 where a word
begins). A document is never divided between shards. A data set does not fix sequence length, masking or batch size.

A data set on a server or in an object store is read through a cache: see `discern.data.dataset.remote`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Int

from discern.data.dataset.manifest import (
    COUNTS_NAME,
    TOKENIZER_NAME,
    FileInfo,
    Manifest,
    ShardInfo,
    SplitInfo,
    SplitName,
    read_manifest,
)
from discern.data.dataset.remote import RemoteFolder
from discern.data.remote import remote_address, shown
from discern.errors import DataError
from discern.storage.checksums import cached_checksum, understood, verification_is_on

if TYPE_CHECKING:
    import tokenizers

    import discern.types


PREPARE_AGAIN = "the data set is damaged: copy the file back, or run the same `discern prepare` again with --overwrite"


class LocalFiles:
    """The files of a data set on this machine. Each stays mapped into memory once it was read.

    Attributes:
        folder: folder of the data set.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._maps: dict[str, np.memmap] = {}

    def array(self, name: str, expected: FileInfo, dtype: np.dtype) -> np.memmap:
        """A file as an array.

        Raises:
            DataError: it is missing, or does not match its checksum, unless verification is switched off.
        """
        if name not in self._maps:
            path = self.folder / name
            with understood(path, hint=PREPARE_AGAIN):
                if verification_is_on() and (found := cached_checksum(path)) != expected.sha256:
                    raise DataError(
                        f"{path} is damaged: its SHA-256 is {found[:12]}..., but the manifest has {expected.sha256[:12]}...",
                        hint=PREPARE_AGAIN,
                    )
                self._maps[name] = np.memmap(path, dtype=dtype, mode="r")
        return self._maps[name]

    def __getstate__(self) -> dict[str, object]:
        # Pickling a memory map copies its content; the other process maps the file itself.
        return vars(self) | {"_maps": {}}


Files = LocalFiles | RemoteFolder
"""Where the files of a data set are."""


class Shard:
    """A shard. Each file is mapped into memory and compared with its checksum when it is first used.

    Attributes:
        info: entry of the shard in the manifest.
        first_token: offset of the first token within the split.
    """

    def __init__(self, files: Files, info: ShardInfo, dtype: np.dtype, first_token: int) -> None:
        self.info = info
        self.first_token = first_token
        self._files, self._dtype = files, dtype

    @property
    def tokens(self) -> np.memmap:
        """(T,) token ids."""
        return self._map("tokens", self._dtype)

    @property
    def document_starts(self) -> Int[np.ndarray, " bounds"]:
        """(D+1,) start of each document within the shard, then the number of tokens."""
        return self._map("documents", np.dtype("<i8"))

    @property
    def sentence_starts(self) -> Int[np.ndarray, " bounds"]:
        """(S+1,) start of each sentence within the shard, then the number of tokens."""
        return self._map("sentences", np.dtype("<i8"))

    def word_starts(self, start: int, stop: int) -> Bool[np.ndarray, " n"]:
        """True where a word begins, for tokens `start` to `stop` of the shard."""
        bits = np.unpackbits(self._map("words", np.dtype("u1"))[start // 8 : (stop + 7) // 8])
        first = start % 8
        return bits[first : first + stop - start].astype(bool)

    def _map(self, suffix: str, dtype: np.dtype) -> np.memmap:
        """A file of the shard. It may be fetched again for each call, so callers keep what they read several times."""
        return self._files.array(f"{self.info.name}.{suffix}", self.info.files[suffix], dtype)


class TokenSplit:
    """The tokens of a split as one long array over its shards.

    Attributes:
        num_tokens: number of tokens in the split.
        shards: the shards, in order.
    """

    def __init__(self, files: Files, info: SplitInfo, dtype: np.dtype) -> None:
        self.num_tokens = info.num_tokens
        firsts = np.cumsum([0] + [shard.num_tokens for shard in info.shards])
        self.shards = [Shard(files, shard, dtype, int(first)) for shard, first in zip(info.shards, firsts, strict=False)]
        self._bounds: Int[np.ndarray, " bounds"] = firsts

    def read(self, start: int, stop: int) -> Int[np.ndarray, " n"]:
        """Token ids `start` to `stop` of the split, int64; may cross shards."""
        parts = [shard.tokens[first:last].astype(np.int64) for shard, first, last in self._pieces(start, stop)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def word_starts(self, start: int, stop: int) -> Bool[np.ndarray, " n"]:
        """True where a word begins, for tokens `start` to `stop` of the split."""
        parts = [shard.word_starts(first, last) for shard, first, last in self._pieces(start, stop)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=bool)

    def _pieces(self, start: int, stop: int) -> list[tuple[Shard, int, int]]:
        """The shards that contain tokens `start` to `stop`, with the range within each."""
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
        folder: folder of the data set; of one elsewhere, the folder of its manifest and tokenizer on this machine.
        manifest: manifest of the data set.
        remote: where the files are fetched from; None for a data set on this machine.
    """

    def __init__(self, folder: Path, manifest: Manifest, remote: RemoteFolder | None = None) -> None:
        self.folder = folder
        self.manifest = manifest
        self.remote = remote
        self._files: Files = remote or LocalFiles(folder)
        self._splits: dict[str, TokenSplit] = {}

    @classmethod
    def open(cls, folder: Path | str) -> TokenData:
        """The data set in `folder`. Checks the size of every file; contents are checked when they are first used.

        Args:
            folder: a folder, or the address of one: `s3://`, `gs://`, `hf://` or `https://`. Its files are fetched when they are
                first used.

        Raises:
            ConfigError: an optional package for the address is missing.
            DataError: the folder is not a data set, has another format version, or a file is missing or of the wrong size.
            OSError: the cache cannot be written.
        """
        if (address := remote_address(folder)) is not None:
            remote = RemoteFolder.open(address)
            return cls(remote.folder, read_manifest(remote.folder), remote)
        folder = Path(folder)
        manifest = read_manifest(folder)
        for name, file in manifest.files.items():
            found = (folder / name).stat().st_size if (folder / name).is_file() else None
            if found != file.size:
                state = "is missing" if found is None else f"has {found} bytes"
                raise DataError(f"{folder / name} {state}, but the manifest has {file.size} bytes", hint=PREPARE_AGAIN)
        if not (folder / TOKENIZER_NAME).is_file():
            raise DataError(f"{folder / TOKENIZER_NAME} is missing", hint="copy it back, or prepare the data again")
        return cls(folder, manifest)

    @property
    def location(self) -> str:
        """What records say about where the data set is: the path of its folder, or its address without a query."""
        return shown(self.remote.address) if self.remote is not None else str(self.folder.resolve())

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: the largest id plus one."""
        return self.manifest.tokenizer.vocab_size

    @property
    def tokenizer_fingerprint(self) -> str:
        """Hash of everything in the tokenizer that decides the ids."""
        return self.manifest.tokenizer.fingerprint

    @property
    def fingerprint(self) -> str:
        """Hash of the data set: its tokenizer and its shards."""
        return self.manifest.fingerprint

    @property
    def special_tokens(self) -> discern.types.SpecialTokens:
        """Ids of [PAD], [UNK], [CLS], [SEP] and [MASK]."""
        from discern.types import SpecialTokens  # imports torch

        return SpecialTokens(**self.manifest.tokenizer.special_tokens)

    def split(self, name: SplitName) -> TokenSplit:
        """The tokens of `train` or `heldout`."""
        if name not in self._splits:
            dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
            self._splits[name] = TokenSplit(self._files, self.manifest.splits[name], dtype)
        return self._splits[name]

    def tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer of the data set.

        Raises:
            DataError: tokenizer.json does not match the manifest.
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
        """(V,) number of occurrences of each id in the train split.

        Raises:
            DataError: the file is damaged.
        """
        return self._files.array(COUNTS_NAME, self.manifest.token_counts, np.dtype("<i8")).astype(np.int64)
