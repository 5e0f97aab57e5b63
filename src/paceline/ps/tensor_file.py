"""Files of arrays in the safetensors format, written without a copy and read through the library.

Called by ``ps/snapshot.py`` and ``ps/saving.py``. The library's writer wants all bytes of a tensor
as one object, which would double a server's memory; the format is a length, a JSON header and raw
bytes, so it is written here, and tests read it back with the library. A file appears under its name
when it is complete and on disk, or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.ps.faults import Place, reach

_NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
_PIECE = 1 << 26  # bytes of one write
TEMPORARY = ".partial"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
    """Write a file, and return its size. Tensors must be contiguous.

    Raises:
        OSError: The disk does not want to; nothing is left behind.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        try:
            size = _write_all(descriptor, tensors, metadata)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        reach(Place.WRITTEN)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return size


def _write_all(descriptor: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    write_bytes(descriptor, len(text).to_bytes(8, "little") + text)
    for index, tensor in enumerate(tensors.values()):
        if index == len(tensors) // 2:
            reach(Place.WRITING)
        if tensor.numel():
            write_bytes(descriptor, tensor.flatten().view(torch.uint8).numpy().data)
    return 8 + len(text) + at


def write_bytes(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of it, however often the kernel takes only a part."""
    view = memoryview(data).cast("B")
    while len(view):
        view = view[os.write(descriptor, view[:_PIECE]) :]


def sync_directory(directory: Path) -> None:
    """Make names in a directory survive the machine."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class TensorFile:
    """An open file; tensors are read in pieces."""

    def __init__(self, path: Path, opened: Any) -> None:
        self.path = path
        self._opened = opened
        self.metadata: dict[str, str] = opened.metadata() or {}
        self.names: set[str] = set(opened.keys())

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
