"""Reads a checkpoint back, without trusting its bytes.

Used by :mod:`paceline.elastic.state`. What is not in tensors is JSON. Tensors are read by
``torch.distributed.checkpoint``, which loads each with ``weights_only``; its index of them is a
pickle, which is read here by an unpickler that knows the classes of such an index and no others.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from paceline.errors import CheckpointError

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "collections": {"OrderedDict"},
}


def read_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors, by name, from a checkpoint.

    Raises:
        CheckpointError: They are not there, do not fit, or the files are damaged.
    """
    if not tensors:
        return
    try:
        _read(_SafeReader(folder), dict(tensors))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{folder} could not be read: {type(error).__name__}: {error}. If its files are "
            "damaged, load the checkpoint before it"
        ) from error


def _read(reader: _SafeReader, tensors: dict[str, torch.Tensor]) -> None:
    """Do what ``torch.distributed.checkpoint.load`` does, in one process, without a warning."""
    planner, metadata = DefaultLoadPlanner(), reader.read_metadata()
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    local = reader.prepare_local_plan(planner.create_local_plan())
    plans = reader.prepare_global_plan(planner.create_global_plan([local]))
    plan = planner.finish_plan(plans[0])
    reader.read_data(plan, planner).wait()


class _SafeReader(FileSystemReader):
    """torch's reader, with an index that cannot run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the index of a checkpoint."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _IndexUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"the index of {self.path} is a {type(metadata).__name__}")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        for entry in metadata.state_dict_metadata.values():
            if not isinstance(entry, TensorStorageMetadata):  # it would be unpickled
                raise CheckpointError(f"the index of {self.path} has more than tensors in it")
        for info in (metadata.storage_data or {}).values():
            name = str(info.relative_path)
            if Path(name).name != name:
                raise CheckpointError(f"the index of {self.path} names a file elsewhere: {name!r}")
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f"the index of the checkpoint asks for {module}.{name}, which no index has: it was not "
            "written by state.save(), and is not loaded"
        )


def _enum_member(kind: object, name: object) -> enum.Enum:
    """An early Python 3.11 (3.11.2) pickles a member as ``getattr(its class, its name)``."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and isinstance(name, str):
        return kind[name]
    raise CheckpointError(f"the index of the checkpoint asks for {name!r} of {kind!r}")
