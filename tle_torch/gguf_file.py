"""Reading GGUF files: metadata, table of tensors, mapped data.

Everything that a file says about itself is checked here, so that what reads on can rely on it. Layout (little-endian;
source: the GGUF specification in ggml's documentation):

    "GGUF"  u32 version  u64 tensors  u64 metadata entries
    entry   string key, u32 type, value             string: u64 length, UTF-8; array: u32 type, u64 count, values
    tensor  string name, u32 dimensions, u64 each (fastest first), u32 type, u64 offset from the start of the data
    data    at the next multiple of general.alignment (32)

The gguf package reads the same, but makes a numpy object of every string of the vocabulary: seconds for a file that is
read here in some hundredths of one.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

__all__ = ["GgufFile", "Strings", "Tensor"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # when the file names none
_MAX_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
# By the number of a metadata type: its code in the struct module.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_NOT_UTF8 = "a string of the header is not UTF-8: the file is damaged"

FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file.

    Attributes:
        name: as in the file.
        shape: slowest dimension first, as torch has it.
        type: the name of its GGUF type, as "Q4_0".
        begin, nbytes: where its data lie in the file, in bytes from the beginning.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    begin: int
    nbytes: int


class Strings:
    """An array of strings in a file's metadata, as a vocabulary is: iterating reads them from the file, which must be
    open. Ten thousands of small objects that live while others are made leave Python's heap in pieces.

    Raises:
        ValueError: in iteration: a string is not UTF-8.
    """

    def __init__(self, file: GgufFile, begin: int, count: int):
        self._file, self._begin, self._count = file, begin, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.strings_at(self._begin, self._count))


class GgufFile:
    """An open GGUF file; a context manager.

    Attributes:
        path: the file.
        metadata: every entry; arrays of strings are `Strings`, others lists.
        tensors: by name, in the file's order.
        architecture: `general.architecture`.

    Raises:
        TypeError: `path` is no path.
        FileNotFoundError: there is no such file.
        ValueError: it is no GGUF file, of another version or byte order, cut off, or contradicts itself.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"there is no file {self.path}")
        with self.path.open("rb") as file:
            magic = file.read(len(_MAGIC))
            if magic != _MAGIC:
                raise ValueError(f"{self.path} is no GGUF file: it begins with {magic!r}, not {_MAGIC!r}")
            # A private mapping, because torch wants memory that may be written; nobody does.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        try:
            self._read()
        except BaseException:
            self._map.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_) -> None:
        # Where an error ends the block, its traceback holds the data that was being read: the mapping goes with them.
        with contextlib.suppress(BufferError):
            self._map.close()

    def bytes_of(self, tensor: Tensor) -> torch.Tensor:
        """The data of a tensor, uint8 [nbytes], in the mapping: valid until the file is closed."""
        return torch.from_numpy(np.frombuffer(self._map, np.uint8, tensor.nbytes, tensor.begin))

    def release(self) -> None:
        """Gives the memory of the file's pages back. They can still be read, from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _read(self) -> None:
        try:
            version, tensors, entries = struct.unpack_from("<IQQ", self._map, len(_MAGIC))
            if version & 0xFFFF == 0 and version:
                raise self._error("the file is big-endian, and only little-endian files can be read")
            if version not in _VERSIONS:
                raise self._error(f"GGUF version {version} cannot be read, only {' and '.join(map(str, _VERSIONS))}")
            if tensors == 0:
                raise self._error("the file holds no tensors, so it is no model (a vocabulary alone, perhaps)")
            self._position = len(_MAGIC) + 20
            self.metadata = self._read_metadata(entries)
            table = self._read_table(tensors)
        # A length that points past the end shows at the next read.
        except (struct.error, OverflowError, RecursionError):
            raise self._error("the file is cut off in its header, or damaged") from None
        except UnicodeDecodeError:
            raise self._error(_NOT_UTF8) from None
        self.architecture = self.metadata.get("general.architecture")
        if not isinstance(self.architecture, str):
            raise self._error("the metadata do not name an architecture (general.architecture)")
        self.tensors = self._place(table)

    def _error(self, what: str) -> ValueError:
        return ValueError(f"{self.path.name}: {what}")

    def strings_at(self, begin: int, count: int) -> list[str]:
        """The strings of an array that begins at a byte of the file."""
        data, unpack, strings = self._map, _LENGTH.unpack_from, []
        try:
            for _ in range(count):
                (length,) = unpack(data, begin)
                end = begin + _LENGTH.size + length
                strings.append(str(data[begin + _LENGTH.size : end], "utf-8"))
                begin = end
        except UnicodeDecodeError:
            raise self._error(_NOT_UTF8) from None
        return strings

    def _string(self) -> str:
        (length,) = _LENGTH.unpack_from(self._map, self._position)
        begin = self._position + _LENGTH.size
        self._position = begin + length
        return str(self._map[begin : self._position], "utf-8")

    def _numbers(self, code: str, count: int = 1) -> tuple:
        layout = struct.Struct(f"<{count}{code}")
        numbers = layout.unpack_from(self._map, self._position)
        self._position += layout.size
        return numbers

    def _number(self, code: str) -> int | float:
        return self._numbers(code)[0]

    def _read_metadata(self, entries: int) -> dict[str, object]:
        metadata: dict[str, object] = {}
        for _ in range(entries):
            key = self._string()
            if key in metadata:
                raise self._error(f"the metadata have {key!r} twice")
            metadata[key] = self._value(self._number("I"), key)
        return metadata

    def _value(self, kind: int, key: str) -> object:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._error(f"the metadata's {key!r} is of the unknown type {kind}")
        element, count = self._number("I"), self._number("Q")
        if element in _SCALARS:
            return list(self._numbers(_SCALARS[element], count))
        if element == _STRING:
            strings = Strings(self, self._position, count)
            self._position = self._end_of_strings(count)
            return strings
        return [self._value(element, key) for _ in range(count)]

    def _end_of_strings(self, count: int) -> int:
        data, unpack, end = self._map, _LENGTH.unpack_from, self._position
        for _ in range(count):
            end += _LENGTH.size + unpack(data, end)[0]
        return end

    def _read_table(self, count: int) -> list[tuple[str, tuple[int, ...], int, int]]:
        """(name, shape, number of the type, offset) of each tensor."""
        table = []
        for _ in range(count):
            name, dimensions = self._string(), self._number("I")
            if not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise self._error(f"tensor {name!r} has {dimensions} dimensions: the file is damaged")
            shape = self._numbers("Q", dimensions)[::-1]
            table.append((name, shape, self._number("I"), self._number("Q")))
        return table

    def _place(self, table: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, Tensor]:
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise self._error(f"general.alignment is {alignment!r}, not a multiple of 8")
        start = -(-self._position // alignment) * alignment
        tensors: dict[str, Tensor] = {}
        for name, shape, number, offset in table:
            if name in tensors:
                raise self._error(f"the file has tensor {name!r} twice")
            try:
                kind = GGMLQuantizationType(number)
            except ValueError:
                raise self._error(f"tensor {name!r} is of the unknown type {number}") from None
            block, block_bytes = GGML_QUANT_SIZES[kind]
            elements = math.prod(shape)
            if elements == 0 or shape[-1] % block:
                raise self._error(
                    f"tensor {name!r} has the shape {list(shape)}, which blocks of {block} ({kind.name}) cannot have"
                )
            nbytes, begin = elements // block * block_bytes, start + offset
            if begin + nbytes > len(self._map):
                raise self._error(
                    f"the file is cut off: tensor {name!r} ends at byte {begin + nbytes}, the file at {len(self._map)}"
                )
            tensors[name] = Tensor(name, shape, kind.name, begin, nbytes)
        return tensors
