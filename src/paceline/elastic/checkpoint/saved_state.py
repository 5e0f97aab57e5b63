"""A state as a checkpoint: named tensors, and JSON for the rest.

Called by :mod:`paceline.elastic.state`, with the modules and the tree that it also sends to ranks
that join (:mod:`paceline.elastic.transfer`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import paceline
from paceline.elastic.checkpoint import folder as folders
from paceline.elastic.checkpoint.reader import read_tensors
from paceline.elastic.checkpoint.writer import Save
from paceline.elastic.transfer import broadcast_text, describe, make_tensors, rebuild
from paceline.errors import CheckpointError
from paceline.printable import listed
from paceline.transport.messages import GroupMessages


def begin_save(
    path: Path, step: int, keep: int, modules: Sequence[torch.nn.Module], tree: Any
) -> Save:
    """Copy a state, and let a thread write it."""
    inner: list[torch.Tensor] = []
    description = describe(tree, inner)
    tensors = _named(modules) | {f"tensor.{n}": tensor for n, tensor in enumerate(inner)}
    facts = {
        "paceline": paceline.__version__,
        "torch": torch.__version__,
        "step": step,
        "saved_s": time.time(),
        "shapes": {name: _shape(tensor) for name, tensor in tensors.items()},
        "tree": description,
    }
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    return Save(path, step, keep, facts, copies)


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint that a path means. Ranks that were started together take rank 0's answer."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return folders.find(path)
    assert dist.group.WORLD is not None
    messages = GroupMessages(dist.group.WORLD)
    found = folders.find(path) if messages.rank == 0 else None
    name = broadcast_text(messages, f"={found or ''}", 0)[1:]
    return Path(name) if name else None


def load_checkpoint(folder: Path, modules: Sequence[torch.nn.Module]) -> Any:
    """Fill the modules from a checkpoint, and return its tree.

    Raises:
        CheckpointError: It is missing, damaged, or does not fit. Then nothing was changed, unless
            the files turn out to be damaged while they are read.
    """
    facts = folders.read_description(folder)
    named = _named(modules)
    try:
        inner = {f"tensor.{n}": t for n, t in enumerate(make_tensors(facts["tree"]))}
        _check(folder, facts["shapes"], named | inner)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder} has a damaged description: {error!r}") from None
    on_cpu = {name: t.detach() for name, t in named.items() if t.device.type == "cpu"}
    elsewhere = {n: torch.empty_like(t, device="cpu") for n, t in named.items() if n not in on_cpu}
    read_tensors(folder, on_cpu | elsewhere | inner)
    with torch.no_grad():
        for name, tensor in elsewhere.items():
            named[name].copy_(tensor)
    return rebuild(facts["tree"], iter(inner.values()))


def _named(modules: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """All parameters and buffers, each once."""
    return {
        f"module.{number}.{name}": tensor
        for number, module in enumerate(modules)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }


def _shape(tensor: torch.Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype)]


def _check(folder: Path, saved: dict[str, Any], mine: dict[str, torch.Tensor]) -> None:
    if missing := sorted(mine.keys() - saved.keys()):
        raise CheckpointError(
            f"{folder} does not have {listed(missing, 1)}: it was saved with "
            "another model. Build the model that it was saved with"
        )
    if extra := sorted(saved.keys() - mine.keys()):
        raise CheckpointError(f"{folder} has {listed(extra, 1)}, which this model does not have")
    for name, tensor in mine.items():
        if saved[name] != _shape(tensor):
            raise CheckpointError(
                f"{name} is {_shape(tensor)} here and {saved[name]} in {folder}: build the model "
                "that it was saved with"
            )
