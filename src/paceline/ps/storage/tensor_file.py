"""Files of arrays in the safetensors format, written without a copy and read through the library.

Called by ``ps/storage/snapshot.py``, ``ps/storage/save.py`` and ``ps/storage/load.py``. The
library's writer wants all bytes of a tensor as one object, which would double a server's memory;
the format is a length, a JSON header and raw bytes, so it is written here, and tests read it back
with the library. A file appears under its name when it is complete and on disk, or not at all.

[Note: checksum]
The first entry of the metadata, ``crc32``, is the CRC-32 of the whole file, header included, with
eight zeros in its own place. It is written last, before the file has its name. CRC-32 runs at
4 GB/s here, blake2b at 0.9, sha256 at 1.8; it is against disks, not against people.
"""

from __future__ import annotations

import io
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.ps.storage import files
from paceline.ps.storage.faults import FaultPoint, reach

_NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
CHECKSUM = "crc32"
"""The name in a file's metadata."""
_NO_CRC = b"00000000"
_CRC_KEY = f'"{CHECKSUM}": "'.encode()
_MOST_HEADER = 100_000_000  # as in the library
_BUFFER = 1 << 20


@dataclass(frozen=True)
class Stream:
    """A tensor that is written a piece at a time.

    Args:
        dtype: Of its values.
        shape: Of the whole.
        pieces: Its lines, in their order; contiguous.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Iterable[Tensor]

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | Stream], metadata: Mapping[str, str]
) -> int:
    """Write a file, and return its size. Tensors must be contiguous.

    Raises:
        OSError: The disk does not want to; nothing is left behind.
        ValueError: A stream was not as long as it said.
    """
    with files.new_file(path) as descriptor:
        size = _write_all(descriptor, _streams(tensors), metadata)
        reach(FaultPoint.WRITTEN)
    return size


def _streams(tensors: Mapping[str, Tensor | Stream]) -> dict[str, Stream]:
    return {
        name: Stream(each.dtype, tuple(each.shape), [each]) if isinstance(each, Tensor) else each
        for name, each in tensors.items()
    }


def _write_all(descriptor: int, streams: Mapping[str, Stream], metadata: Mapping[str, str]) -> int:
    header: dict[str, Any] = {"__metadata__": {CHECKSUM: _NO_CRC.decode(), **metadata}}
    at = 0
    for name, stream in streams.items():
        header[name] = {
            "dtype": _NAMES[stream.dtype],
            "shape": list(stream.shape),
            "data_offsets": [at, at + stream.size],
        }
        at += stream.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = len(text).to_bytes(8, "little") + text
    files.write_all(descriptor, start)
    crc = zlib.crc32(start)
    for index, (name, stream) in enumerate(streams.items()):
        if index == len(streams) // 2:
            reach(FaultPoint.WRITING)
        crc = _write_stream(descriptor, name, stream, crc)
    files.write_all_at(descriptor, b"%08x" % crc, start.index(_CRC_KEY) + len(_CRC_KEY))
    return len(start) + at


def _write_stream(descriptor: int, name: str, stream: Stream, crc: int) -> int:
    size = 0
    for piece in stream.pieces:
        if piece.numel():
            data = piece.flatten().view(torch.uint8).numpy().data
            files.write_all(descriptor, data)
            crc = zlib.crc32(data, crc)
            size += len(data)
    if size != stream.size:
        raise ValueError(f"{name} has {size} bytes, not {stream.size}")
    return crc


def has_checksum(path: Path) -> bool:
    """Read a whole file, and compare it with its checksum; False is one without.

    Raises:
        ValueError: It is not what was written.
        OSError: It cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        length = file.read(8)
        text = file.read(min(int.from_bytes(length, "little"), _MOST_HEADER))
        at = text.find(_CRC_KEY)
        if at < 0:
            return False
        at += len(_CRC_KEY)
        found = text[at : at + len(_NO_CRC)]
        crc = zlib.crc32(length + text[:at] + _NO_CRC + text[at + len(_NO_CRC) :])
        crc = _crc_of_rest(file, crc)
    if found != b"%08x" % crc:
        raise ValueError(
            f"{path} is damaged: its checksum says {found.decode(errors='replace')}, and its bytes "
            f"have {crc:08x}"
        )
    return True


def _crc_of_rest(file: io.FileIO, crc: int) -> int:
    buffer = memoryview(bytearray(_BUFFER))
    while count := file.readinto(buffer):
        crc = zlib.crc32(buffer[:count], crc)
    return crc


class TensorFile:
    """An open file; tensors are read in pieces."""

    def __init__(self, path: Path, opened: Any) -> None:
        self.path = path
        self._opened = opened
        self.metadata: dict[str, str] = opened.metadata() or {}

    def shape(self, name: str) -> list[int]:
        """Of a tensor."""
        return list(self._opened.get_slice(name).get_shape())

    def lines(self, name: str, start: int, stop: int) -> Tensor:
        """These lines of a tensor, copied."""
        found: Tensor = self._opened.get_slice(name)[start:stop]
        return found

    def whole(self, name: str) -> Tensor:
        """All of a tensor."""
        found: Tensor = self._opened.get_tensor(name)
        return found


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """Open a file for reading.

    Raises:
        ValueError: It is damaged, or no safetensors file; the text says what.
        OSError: It cannot be read.
    """
    try:
        with safe_open(path, framework="pt") as opened:
            yield TensorFile(path, opened)
    except SafetensorError as error:
        raise ValueError(f"{path} is no complete safetensors file: {error}") from None
