"""Records checksums of a training over shards into its run folder, for ``paceline verify``.

Told by the loop over shards of every round, micro-batch and output. Does nothing without a run
folder. What is written: :mod:`paceline.observe.checksum_file`.

[Note: gradients of each shard]
Where siblings are added by autograd, or in a bucket, no shard's gradients can be seen. So in the
rounds that record them, hooks on parameters look at them, one shard after the other. The loop takes
these for hooks of a user: it gives every shard gradients of its own then.

[Note: the state at the end]
A round begins with what the update before it has made; nothing begins after the last one. What it
has made is recorded when the process ends, or the wrapper is let go of.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from multiprocessing import util
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from paceline.config import Shards
from paceline.containers import tensors_in
from paceline.ddp.agree.checksum import checksums, combine
from paceline.exit_reason import ExitReason, add_listener
from paceline.observe.checksum_file import ChecksumWriter, RoundChecksums
from paceline.observe.run_folder import RUN_DIR, recorded_rank

_recording: WeakValueDictionary[tuple[str, int], ShardRecord] = WeakValueDictionary()


class ShardRecord:
    """The checksums of one wrapper's rounds.

    Args:
        module: Whose parameters and buffers.
        policy: Which rounds are recorded, and how many shards there are.
    """

    def __init__(self, module: torch.nn.Module, policy: Shards) -> None:
        self._module = module
        self._policy = policy
        self._writer: ChecksumWriter | None = None
        self._found: RoundChecksums | None = None
        self._inputs: dict[int, str] = {}
        self._shard = 0
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._present: tuple[int, int] = (0, -1)
        self._unrecorded = 0
        self._pid = os.getpid()
        folder = os.environ.get(RUN_DIR)
        if folder and policy.checksum_every:
            rank = recorded_rank(dist.get_rank())
            self._writer = ChecksumWriter(folder, rank, wrapper=self._number(folder))
            add_listener(self)
            util.Finalize(None, _write_ends, exitpriority=0)

    def _number(self, folder: str) -> int:
        """The first that no other wrapper of this process has."""
        number = next(n for n in itertools.count() if (folder, n) not in _recording)
        _recording[folder, number] = self
        return number

    def open(self, number: int, rank: int, hooked: Sequence[torch.Tensor] = ()) -> None:
        """A round begins; rank 0 looks at the state that all ranks have.

        Args:
            number: Of the round.
            rank: This one.
            hooked: Parameters whose gradients hooks may look at.
        """
        self.leave()
        self._found = None
        self._present, self._unrecorded = (number, rank), 0
        writer = self._writer
        if writer is None or number % self._policy.checksum_every or not writer.wants(number):
            return
        self._found = RoundChecksums(number, count=self._policy.count)
        if rank == 0:
            self._found.tensors.update(self._state())
        if self._takes_gradients:
            names = self._names()
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(
                    functools.partial(self._take_gradient, names[parameter])
                )
                for parameter in hooked
            ]

    def _state(self) -> dict[str, str]:
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        sums = checksums([tensor for _, tensor in named])
        return {name: f"{value:016x}" for (name, _), value in zip(named, sums, strict=True)}

    # --- shards --------------------------------------------------------------------------------

    @property
    def _takes_gradients(self) -> bool:
        """Whether this round records them."""
        every = self._policy.checksum_gradients_every
        return self._found is not None and every > 0 and self._found.round % every == 0

    def _names(self) -> dict[torch.Tensor, str]:
        return {parameter: name for name, parameter in self._module.named_parameters()}

    def _take_gradient(self, name: str, parameter: torch.Tensor) -> None:
        if self._found is not None and parameter.grad is not None:
            found = self._found.gradients.setdefault(self._shard, {})
            found[name] = _checksum_of_gradient(parameter.grad)

    def take_gradients(
        self,
        shard: int,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        """A shard has brought these; for rounds without hooks."""
        if self._found is not None and self._takes_gradients:
            names = self._names()
            self._found.gradients[shard] = {
                names[parameter]: _checksum_of_gradient(gradient)
                for parameter, gradient in zip(parameters, gradients, strict=True)
                if gradient is not None
            }

    def take_input(self, shard: int, micro: Any) -> None:
        """A shard begins with this micro-batch."""
        self._shard = shard
        if self._found is not None:
            self._inputs[shard] = _checksum(micro)

    def take_output(self, shard: int, output: Any) -> None:
        """The module has made this of it."""
        if self._found is not None:
            self._found.shards[shard] = (self._inputs[shard], _checksum(output))

    # --- the end -------------------------------------------------------------------------------

    def leave(self) -> None:
        """The loop has ended, well or not: no gradients come any more."""
        while self._hooks:
            self._hooks.pop().remove()

    def close(self) -> None:
        """The round is complete."""
        found, self._found = self._found, None
        number, rank = self._present
        self._unrecorded = number + 1 if rank == 0 else 0
        if found is not None and self._writer is not None:
            self._writer.write(found)

    def on_process_exit(self, reason: ExitReason) -> None:
        """See :class:`paceline.exit_reason.Listener`: an exception may leave half an update."""
        if reason.text:
            self._unrecorded = 0
        self._write_end()

    def on_thread_exit(self, ident: int, reason: ExitReason) -> None:
        """See :class:`paceline.exit_reason.Listener`."""

    def __del__(self) -> None:
        self._write_end()

    def _write_end(self) -> None:
        number, self._unrecorded = self._unrecorded, 0
        if number and self._writer is not None and os.getpid() == self._pid:
            self._writer.write(RoundChecksums(number, self._state(), {}, self._policy.count))


def _write_ends() -> None:
    """The end of a process that multiprocessing has started: atexit has no part in it."""
    for record in list(_recording.values()):
        record._write_end()


def _checksum_of_gradient(gradient: torch.Tensor) -> str:
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return f"{combine(checksums([gradient.indices(), gradient.values()])):016x}"
    return f"{checksums([gradient])[0]:016x}"


def _checksum(value: Any) -> str:
    return f"{combine(checksums(list(tensors_in(value)))):016x}"
