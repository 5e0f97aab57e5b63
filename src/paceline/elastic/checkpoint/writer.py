"""Writes a state to the disk while training goes on.

Used by :mod:`paceline.elastic.state`. One rank writes: in data parallelism it holds all of the
state, so that nothing has to be agreed upon, and a rank that dies meanwhile changes nothing.

[Note: who waits]
``save`` copies the tensors, and a thread writes the copies (``torch.distributed.checkpoint``). A
save that begins while the one before is under way waits for it. The thread is no daemon: a program
that ends, also by Ctrl-C, ends after the save; one that is killed leaves the checkpoint before.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from paceline.elastic.checkpoint import folder as folders
from paceline.errors import CheckpointError

logger = logging.getLogger("paceline.elastic")


class Save:
    """One checkpoint on its way to the disk.

    Args:
        parent: Where checkpoints lie.
        step: Its number.
        keep: How many there are to be afterwards.
        facts: What is not in tensors, for JSON.
        tensors: Copies, which nobody else changes.
    """

    def __init__(
        self,
        parent: Path,
        step: int,
        keep: int,
        facts: dict[str, Any],
        tensors: dict[str, torch.Tensor],
    ) -> None:
        self._parent, self._step, self._keep = parent, step, keep
        self._facts = facts
        self._tensors = tensors
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-save")
        self._thread.start()

    def is_done(self) -> bool:
        """Whether it is on the disk, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until it is on the disk; return its folder.

        Raises:
            CheckpointError: It could not be written; those before it are untouched.
        """
        self._thread.join()
        if self._error is not None:
            raise CheckpointError(
                f"the checkpoint of step {self._step} could not be written to {self._parent}: "
                f"{type(self._error).__name__}: {self._error}. Checkpoints before it are untouched"
            ) from self._error
        return folders.step_folder(self._parent, self._step)

    def _run(self) -> None:
        began_s = time.monotonic()
        size = sum(tensor.nbytes for tensor in self._tensors.values())
        try:
            target = self._write()
        except Exception as error:
            self._error = error
            logger.error("the checkpoint of step %d could not be written: %s", self._step, error)
            return
        finally:
            self._tensors = {}
        logger.info(
            "step %d is saved in %s (%.1f MB in %.2f s)",
            self._step,
            target,
            size / 1e6,
            time.monotonic() - began_s,
        )

    def _write(self) -> Path:
        folder = folders.new_folder(self._parent, self._step)
        folders.write_description(folder, self._facts)
        if self._tensors:
            write_tensors(folder, self._tensors)
        target = folders.publish(folder, self._parent, self._step)
        folders.clean(self._parent, self._keep)
        return target


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors as ``torch.distributed.checkpoint`` does.

    Its ``save`` does the same steps, and warns that there is only one process.
    """
    planner, writer = DefaultSavePlanner(), FileSystemWriter(folder, sync_files=True)
    planner.set_up_planner(dict(tensors), writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    results = writer.write_data(plan, planner).wait()
    writer.finish(metadata, [results])
