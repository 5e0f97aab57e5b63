"""``elastic.State``: what survives a change of membership; ``commit()`` says up to which step.

Made by users; :mod:`paceline.elastic.session` puts it back, sends it and takes it. Must not know
sockets or the coordinator.

[Note: meetings]
The optimizers of local SGD and DiLoCo let ranks meet at the end of some steps, which is a
collective after the parameters have changed. If it fails, they undo the whole step
(:mod:`paceline.hooks.step_undo`), so that also such a rank stands at its last commit.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.ddp import DistributedDataParallel
from paceline.elastic.checkpoint.saved_state import (
    begin_save,
    find_checkpoint,
    load_checkpoint,
)
from paceline.elastic.checkpoint.writer import Save
from paceline.elastic.commit.kept import Kept, Stateful
from paceline.elastic.commit.optimizers import BegunSteps, check_optimizer
from paceline.elastic.commit.random_state import (
    KeptGenerator,
    from_plain,
    read_generators,
    to_plain,
    write_generators,
)
from paceline.elastic.commit.wrapper_state import Feedback, WrapperState
from paceline.elastic.data.batch_count import BatchCount
from paceline.elastic.data.cursor import BatchCursor
from paceline.elastic.data.micro_batch import MicroBatch, Pieces
from paceline.elastic.events import MembershipEvent
from paceline.elastic.transfer import check_travels, copy_from
from paceline.errors import CheckpointError, ConfigurationError
from paceline.shards.loader import ShardLoader

logger = logging.getLogger("paceline.elastic")

_VALUES = (bool, int, float, str, type(None))


class State:
    """Everything that training needs to go on: pass it to a function under ``@elastic.run``.

    Each keyword is a member: modules, optimizers, anything with ``state_dict`` and
    ``load_state_dict`` (schedulers, scalers, :class:`DistributedSampler`), generators of your own,
    and plain values (numbers, texts), which are attributes that may be assigned::

        state = elastic.State(model=ddp, optimizer=opt, sampler=sampler, step=0)
        state.step += 1
        state.commit()

    Attributes:
        commits: How many steps are committed.
        events: Changes of membership so far, oldest first.
        is_whole: It is that of the job; not so before or in the middle of a copy.
        wrappers: All of Paceline's wrappers in the modules.
    """

    if TYPE_CHECKING:  # members are attributes, whose names only the caller knows

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __init__(self, **members: Any) -> None:
        self._modules: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._parts: dict[str, Stateful] = {}
        self._names: list[str] = []
        self.sampler: BatchCursor | ShardLoader | None = None
        for name, member in members.items():
            self._add(name, member)
        found = (m for module in self._modules for m in module.modules())
        self.wrappers = [each for each in found if isinstance(each, DistributedDataParallel)]
        self.commits = 0
        self.events: list[MembershipEvent] = []
        self.after_commit: Callable[[], None] | None = None
        self.is_whole = True
        self._has_trained = False
        self._save: Save | None = None
        self._saves_to: tuple[Path, int] | None = None
        self._pieces = Pieces()
        self._steps = BegunSteps(self._optimizers)
        self._wrapper_state = WrapperState(self.wrappers)
        check_travels("what a communication hook remembers", self._wrapper_state.tree())
        self._kept = Kept(self._modules, self._optimizers, self._parts, self._wrapper_state)
        self._batch_count = BatchCount(self.wrappers)
        self._kept.keep(self._values())
        self._weigh()

    def _add(self, name: str, member: Any) -> None:
        if name.startswith("_") or hasattr(type(self), name) or name in ("commits", "events"):
            raise ConfigurationError(f"a state cannot have a member {name!r}: take another name")
        if isinstance(member, torch.nn.Module):
            self._modules.append(member)
        elif isinstance(member, torch.optim.Optimizer):
            check_optimizer(name, member)
            self._optimizers.append(member)
            if hasattr(member, "undoes_failed_steps"):  # [Note: meetings]
                member.undoes_failed_steps = True
        elif isinstance(member, _VALUES):
            self._names.append(name)
        elif isinstance(member, torch.Generator):
            self._parts[name] = KeptGenerator(member)
        elif hasattr(member, "state_dict") and hasattr(member, "load_state_dict"):
            check_travels(f"{name}={type(member).__name__}", member.state_dict())
            self._parts[name] = member
            if isinstance(member, (BatchCursor, ShardLoader)):
                self._set_cursor(member)
        else:
            raise ConfigurationError(
                f"{name}={type(member).__name__} cannot be kept: a state holds modules, "
                "optimizers, generators, numbers, texts, and what has a state_dict to load"
            )
        setattr(self, name, member)

    def _set_cursor(self, cursor: BatchCursor | ShardLoader) -> None:
        if self.sampler is not None:
            raise ConfigurationError(
                "a state holds one DistributedSampler or IterableCursor: a commit moves one. Draw "
                "further data by hand, by state.step"
            )
        self.sampler = cursor
        if isinstance(cursor, ShardLoader):
            cursor.is_moved_by_commits = True
        else:
            cursor.on_size = self._weigh

    # --- committing -------------------------------------------------------------------------------
    def commit(self, batches: int | None = None) -> None:
        """Say that a step is complete: it will never be lost, and never be done again.

        Call it directly after the optimizer's step and what belongs to it (scheduler, scaler). No
        collective may stand between the optimizer's step and this call.

        Args:
            batches: How many global batches of the sampler the step was made of. By default one
                for each reduction of the wrapped model; one if several models are wrapped, or none.
        """
        if isinstance(self.sampler, BatchCursor):
            self._pieces.check_complete(self.sampler)
        self._steps.commit()
        self.commits += 1
        if batches is None and self.sampler is not None:
            batches = self._batch_count.take()
        else:
            self._batch_count.restart()
        if self.sampler is not None:
            self.sampler.advance(batches or 0)
        self._pieces.done = 0
        self._kept.keep(self._values())
        if self.after_commit is not None:
            self.after_commit()

    @contextlib.contextmanager
    def micro_batch(self) -> Iterator[MicroBatch]:
        """Train on one batch of a sampler that has a ``micro_batch``::

            for inputs, targets in loader:
                with state.micro_batch() as micro:
                    micro.scale(loss(ddp(inputs), targets)).backward()
                if micro.is_last:
                    opt.step(); opt.zero_grad(); state.step += 1; state.commit()

        Gradients are accumulated until the last piece of a global batch, whose backward reduces
        them. Losses are means over their batch.
        """
        if not isinstance(self.sampler, BatchCursor):
            raise ConfigurationError(
                "micro_batch() needs a DistributedSampler or IterableCursor in the state"
            )
        with self._pieces.next(self.sampler, self.wrappers) as micro:
            yield micro

    @property
    def is_clean(self) -> bool:
        """Whether no optimizer has begun a step since the last commit."""
        return not self._steps.begun

    @property
    def holds_step(self) -> bool:
        """Whether it could go on from its last commit, if nobody has a later one."""
        return self._has_trained and self.is_whole and self.is_clean

    def put_back(self) -> None:
        """Undo what was done since the last commit, parameters and optimizers aside.

        If an optimizer has begun a step, there is no way back: then all stays as it is.
        """
        self._steps.give_up()
        self._pieces.done = 0
        for wrapper in self.wrappers:
            if wrapper.reducer is not None:
                wrapper.reducer.usage.forget()
        if self.is_clean:
            for name, value in self._kept.put_back().items():
                setattr(self, name, value)
        self._batch_count.restart()

    # --- checkpoints ------------------------------------------------------------------------------
    def save(self, path: str | os.PathLike[str], *, keep: int = 2, wait: bool = False) -> None:
        """Write a checkpoint, for when all ranks die. Call it on all ranks, after a commit.

        Rank 0 writes it, in the background, into a folder of its own below ``path``. It is there as
        a whole or not at all; the ones before stay until then.

        Args:
            path: Where checkpoints lie; on several hosts a path that all of them see.
            keep: How many to keep.
            wait: Return when it is on the disk.

        Raises:
            ConfigurationError: A step is half done.
            CheckpointError: This one, or the one before, could not be written.
        """
        if not self.is_clean:
            raise ConfigurationError(
                "an optimizer has stepped since the last commit: call save() after state.commit()"
            )
        if keep < 1:
            raise ConfigurationError(f"keep is at least 1 checkpoint, not {keep!r}")
        self._saves_to = Path(path), keep
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return
        self.wait_saved()
        self._save = begin_save(Path(path), self.commits, keep, self._modules, self._tree())
        if wait:
            self.wait_saved()

    def save_last(self) -> str:
        """Save where the script has saved before, as the last rank that is left; say where."""
        if self._saves_to is None or not self.is_whole or not self.is_clean:
            return ""
        path, keep = self._saves_to
        self.wait_saved()
        begin_save(path, self.commits, keep, self._modules, self._tree()).wait()
        return str(path)

    def wait_saved(self) -> None:
        """Wait until the checkpoint that is being written is on the disk.

        Raises:
            CheckpointError: It could not be written.
        """
        save, self._save = self._save, None
        if save is not None:
            save.wait()

    def load(self, path: str | os.PathLike[str], *, missing_ok: bool = False) -> bool:
        """Go on from the latest checkpoint; at any number of ranks. Call it before training.

        What compression had left out of gradients is not saved: error feedback begins anew.

        Args:
            path: What ``save`` was given, or the folder of one checkpoint.
            missing_ok: Return False if there is none.

        Raises:
            CheckpointError: There is none; or it is damaged, foreign, or does not fit.
        """
        folder = find_checkpoint(Path(path))
        if folder is None:
            if missing_ok:
                return False
            raise CheckpointError(f"there is no checkpoint in {path}: state.save() makes one")
        tree = load_checkpoint(folder, self._modules)
        self._take_saved(folder, tree)
        logger.info("step %d is loaded from %s", self.commits, folder)
        return True

    def _take_saved(self, folder: Path, tree: dict[str, Any]) -> None:
        try:
            self._take(tree)
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{folder} does not fit this state: {type(error).__name__}: {error}. Make the "
                "state with the members that it was saved with"
            ) from error
        self._after_copy()

    # --- a new epoch ------------------------------------------------------------------------------
    def take_place(self, rank: int, world: int) -> None:
        """Train as another rank, among others."""
        if isinstance(self.sampler, BatchCursor):
            self.sampler.set_place(rank, world)
        self._weigh()

    def has_entered(self) -> None:
        """This rank is in an epoch, and stands where the others stand."""
        self._has_trained = True

    def count_from(self, step: int) -> None:
        """Number the next steps alike on all ranks, for those who read their records."""
        for reducer in filter(None, (wrapper.reducer for wrapper in self.wrappers)):
            reducer.runner.counters.steps = reducer.runner._first_step = step
        self._batch_count.restart()

    def copy_from(self, source: int, step: int) -> None:
        """Take the whole state of a rank; that rank gives it. Collective.

        Who stands where the source stands keeps its own. That is the same, but for what ranks do
        not have in common: own random streams, parameters between two meetings of local SGD.
        """
        tensors = [t for module in self._modules for t in _tensors_of(module)]
        stages, keeps_own = self.holds_step, self.holds_step and self.commits == step
        is_source = torch.distributed.get_rank() == source
        tree = copy_from(source, tensors, self._tree(), keeps_own=keeps_own, stages=stages)
        if not is_source and not keeps_own:
            self.is_whole = False
            self._take(tree)
        self._after_copy()

    def _after_copy(self) -> None:
        self._steps.begun.clear()
        self.is_whole = True
        self._batch_count.restart()
        self._kept.look_again()
        self._kept.keep(self._values())
        self._weigh()

    def _tree(self) -> dict[str, Any]:
        return {
            "commits": self.commits,
            "is_clean": self.is_clean,
            "wrappers": self._wrapper_state.tree(),
            "values": self._values(),
            "optimizers": [each.state_dict() for each in self._optimizers],
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "generators": to_plain(read_generators()),
        }

    def _take(self, tree: dict[str, Any]) -> None:
        self._wrapper_state.take(tree["wrappers"], self._feedback(tree))
        self.commits = tree["commits"]
        for name, value in tree["values"].items():
            setattr(self, name, value)
        for optimizer, state in zip(self._optimizers, tree["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        for name, part in self._parts.items():
            part.load_state_dict(tree["parts"][name])
        write_generators(from_plain(tree["generators"]))

    def _feedback(self, tree: dict[str, Any]) -> Feedback:
        """See [Note: what belongs to a rank] in wrapper_state.py."""
        if not self._has_trained or self.is_clean:
            return Feedback.FORGET
        is_ours = tree["commits"] == self.commits + 1 or not tree["is_clean"]
        return Feedback.KEEP if is_ours else Feedback.ROLL_BACK

    # --- the rest ---------------------------------------------------------------------------------
    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _weigh(self) -> None:
        """Let uneven shares of a global batch count for what they are."""
        if not isinstance(self.sampler, BatchCursor):
            return  # shards have one size
        weight = None if self.sampler.is_even() else float(self.sampler.weight())
        for wrapper in self.wrappers:
            if wrapper.reducer is not None:
                wrapper.reducer.runner.weight = weight

    def close(self) -> None:
        """Let go of the optimizers' hooks, and wait for a save."""
        self._steps.close()
        self.wait_saved()


def _tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
