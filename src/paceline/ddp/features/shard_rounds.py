"""The loop over a rank's shards: ``for micro in ddp.shards(batch): loss(ddp(micro)).backward()``.

A *round* is one forward and backward of every shard, each on one rank. All but the last shard of a
rank run without synchronisation and leave their gradients in :mod:`paceline.ddp.reduce.shard_sums`;
the last one's backward is the step that the reducer knows. Owned by the wrapper.

Where layers need all shards at once, those of a rank run in turns (:mod:`paceline.shards.turns`),
all without synchronisation. Then a backward of its own brings what the last one has left.

[Note: rounds that do not end]
An exception, or ``break``, leaves a round in the middle, while peers wait in its step. The next
round of this rank then only tells them, so that all ranks raise. The generator of the loop may live
as long as the exception's traceback; a round that is not the present one touches nothing any more.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from paceline.config import GradientViews, Shards
from paceline.ddp.agree.reports import FailureKind
from paceline.ddp.autograd.deliver import carrier_of
from paceline.ddp.features.shard_buffers import ShardBuffers
from paceline.ddp.features.shard_meeting import ShardMeeting
from paceline.ddp.features.shard_places import ShardPlace, ShardPlaces
from paceline.ddp.features.shard_record import ShardRecord
from paceline.ddp.reduce.reducer import Reducer
from paceline.ddp.reduce.shard_sums import ShardSums
from paceline.errors import ConfigurationError, HookAlreadyRegisteredError
from paceline.shards.batches import cut_batch
from paceline.shards.streams import OwnStreams, seed_all, stream_seed
from paceline.shards.sums import Gradients
from paceline.shards.tree import Node, Shares
from paceline.shards.turns import Turns
from paceline.torch_private.modules import TorchDDP
from paceline.transport.sparse import add_sparse

if TYPE_CHECKING:
    from paceline.ddp.wrapper import DistributedDataParallel

T = TypeVar("T")


class ShardRounds:
    """The rounds of one wrapper.

    Attributes:
        round: How many rounds are complete. Streams of random numbers begin with it, so that a
            training that goes on from a checkpoint must be told.
    """

    def __init__(
        self,
        sums: ShardSums,
        reducer: Reducer,
        buffers: ShardBuffers,
        record: ShardRecord,
        meeting: ShardMeeting,
    ) -> None:
        self._sums = sums
        self._record = record
        self._meeting = meeting
        self._reducer = reducer
        self._buffers = buffers
        self._policy: Shards = sums.policy
        self._token: object | None = None
        self._begun_at = -1
        self._position = 0
        self._forwards: Counter[int] = Counter()
        self._staying: Node | None = None
        self._can_stay = not any(spec.sparse for spec in reducer.specs)
        self._weight: float | None = None
        self._own: OwnStreams | None = None
        self.round = 0

    def regroup(self, rank: int, world: int) -> None:
        """Go on as another rank, among others; what was under way is forgotten."""
        self._sums.regroup(rank, world)
        self._buffers.forget()
        self._token = self._own = None
        self._begun_at = -1

    @property
    def shares(self) -> Shares:
        """Who owns which shards now."""
        return self._sums.shares

    def cast_to(self, dtype: torch.dtype) -> None:
        """Take all sums in a small dtype, from the next round on.

        Raises:
            ConfigurationError: If there are sparse gradients, or sums are cast already.
        """
        if not self._can_stay:
            raise ConfigurationError(
                "Sparse gradients over shards are summed in their own dtype: a hook that casts "
                "cannot be used here."
            )
        if self._sums.dtype is not None:
            raise HookAlreadyRegisteredError(
                f"The sums of shards are cast to {self._sums.dtype} already; a second hook cannot "
                "be registered."
            )
        self._sums.dtype = dtype

    # --- the loop ------------------------------------------------------------------------------

    def run(self, ddp: TorchDDP, batch: Any) -> Iterator[Any]:
        """Yield a micro-batch for each shard of this rank."""
        if self._meeting.is_needed:
            raise ConfigurationError(
                f"Rank {self._reducer.rank}: SyncBatchNorm needs all shards at once, but this loop "
                "runs them one after the other. Give what it does to "
                "ddp.run_shards(batch, function), which runs them in turns; or use BatchNorm, "
                "whose statistics are the shard's own."
            )
        with self._round(ddp, batch) as micros:
            owned, policy = self.shares.owned, self._reducer.runner.context.policy
            for self._position, micro in enumerate(micros):
                shard = owned[self._position]
                seed_all(self._seed(shard))
                if self._staying is None:
                    node = self._sums.preset(shard, self._reducer.parameters, policy)
                else:
                    node = (self._staying[0], shard + 1)
                self._sums.last, self._sums.arrived = node, 0
                ddp.require_backward_grad_sync = shard == owned[-1]
                self._record.take_input(shard, micro)
                yield micro
                self._end_shard(shard, node, is_last=shard == owned[-1])

    @contextlib.contextmanager
    def _round(self, ddp: TorchDDP, batch: Any) -> Iterator[Sequence[Any]]:
        """Begin a round, and end it: well, or in the middle ([Note: rounds that do not end])."""
        self._check(ddp)
        owned = self.shares.owned
        micros = cut_batch(batch, owned, self._policy.count, self._reducer.rank)
        token = self._open(owned)
        before = self._take_old()
        try:
            yield micros
            self._buffers.close()
            self._add_old(before)
            self._record.close()
            self.round += 1
            before = []
        finally:
            if self._token is token:
                self._close(ddp)
                for parameter, old in zip(self._reducer.parameters, before, strict=False):
                    parameter.grad = old

    def _seed(self, shard: int) -> int:
        return stream_seed(self._policy.seed, self.round, shard)

    # --- in turns ------------------------------------------------------------------------------

    def run_all(
        self, ddp: DistributedDataParallel, batch: Any, function: Callable[[Any], T]
    ) -> list[T]:
        """Run a function for each shard of this rank; in turns, if layers need all shards."""
        if not self._meeting.is_needed:
            return [function(micro) for micro in self.run(ddp, batch)]
        with self._round(ddp, batch) as micros:
            try:
                ddp.require_backward_grad_sync = False
                places, results = self._run_in_turns(micros, function)
                ended = zip(self.shares.owned, places.all, strict=True)
                found = [self._end_turns(shard, place) for shard, place in ended]
                self._meeting.end()
            except Exception:
                self._begun_at = -1  # nobody waits in a step
                self._meeting.fail()
                raise
            finally:
                self._meeting.close()
            self._deliver(ddp, found)
        return results

    def _run_in_turns(
        self, micros: Sequence[Any], function: Callable[[Any], T]
    ) -> tuple[ShardPlaces, list[T]]:
        owned, meeting = self.shares.owned, self._meeting
        seeds = [self._seed(shard) for shard in owned]
        places = ShardPlaces(self._reducer, self._buffers, seeds, self._on_turn)
        turns = Turns(owned, places, meeting.combine)
        meeting.open(self._reducer.runner.context.transport, self.shares, turns)
        for shard, micro in zip(owned, micros, strict=True):
            self._record.take_input(shard, micro)
        return places, turns.run([functools.partial(function, micro) for micro in micros])

    def _on_turn(self, position: int) -> None:
        self._position = self._meeting.position = position

    def _end_turns(self, shard: int, place: ShardPlace) -> Gradients:
        """All shards have run: see what one has left."""
        self._check_forwards(shard, self._forwards[shard])
        if all(gradient is None for gradient in place.gradients):
            raise ConfigurationError(
                f"Rank {self._reducer.rank}, shard {shard}: it has brought no gradient at all. The "
                "function that run_shards calls runs a forward and its backward."
            )
        self._buffers.add(place.changed)
        return place.gradients

    def _deliver(self, ddp: DistributedDataParallel, found: list[Gradients]) -> None:
        """Let the step be one whose backward brings what the last shard has brought before."""
        policy = self._reducer.runner.context.policy
        last = found.pop()
        for shard, gradients in zip(self.shares.owned, found, strict=False):
            with torch.no_grad():
                self._sums.push((shard, shard + 1), gradients, None, policy)
        shard = self.shares.owned[-1]
        self._sums.last = (shard, shard + 1)
        ddp.require_backward_grad_sync = True
        ddp._forward_pass.begin(ddp, self._reducer)
        carrier = self._reducer.expect_backward_of(carrier_of(self._reducer.parameters, last))
        carrier.backward()

    # --- begin and end -------------------------------------------------------------------------

    def _open(self, owned: range) -> object:
        self._tell_of_broken_round(owned)
        self._token = token = object()
        self._reducer.end_shard()
        self._begun_at = self._reducer.counters.steps
        self._staying = None
        self._own = OwnStreams()
        self._sums.open()
        self._forwards.clear()
        same = self._meeting.buffer_names if self._meeting.is_needed else ()
        self._buffers.open(self._sums.shares, without=same)
        self._record.open(self.round, self._reducer.rank)
        return token

    def _tell_of_broken_round(self, owned: range) -> None:
        """Tell the peers, who wait in the step of a round that this rank did not end."""
        if self._own is not None:
            self._own.put_back()
            self._own = None
        if self._begun_at != self._reducer.counters.steps:
            return
        self._sums.open()
        if self._reducer.runner.step_in_flight is not None:
            self._reducer.prepare_forward()  # its backward raised
            return
        detail = f"its loop over shards {owned.start} to {owned.stop - 1} did not run to its end"
        self._reducer.runner.refuse(FailureKind.BACKWARD_RAISED, detail)

    def _close(self, ddp: TorchDDP) -> None:
        self._token = None
        self._reducer.end_shard()
        ddp.require_backward_grad_sync = True
        if self._own is not None:
            self._own.put_back()
            self._own = None
        self._sums.close()

    def _end_shard(self, shard: int, node: Node, *, is_last: bool) -> None:
        self._check_forwards(shard, self._forwards[shard])
        self._buffers.take()
        if is_last:
            return
        self._reducer.end_shard()
        parameters = self._reducer.parameters
        policy = self._reducer.runner.context.policy
        can_stay = self._can_stay and self._sums.stays(node, len(parameters), policy)
        self._staying = node if can_stay else None
        if can_stay:
            return
        gradients: Gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        with torch.no_grad():
            self._sums.push(node, gradients, self._weight, policy)

    def _check_forwards(self, shard: int, forwards: int) -> None:
        if forwards != 1:
            raise ConfigurationError(
                f"Rank {self._reducer.rank}, shard {shard}: the loop over shards has run "
                f"{forwards} forwards with gradients through the wrapper. Each shard is one "
                "forward and one backward; use torch.no_grad() for everything else."
            )

    # --- forwards ------------------------------------------------------------------------------

    def on_forward(self) -> None:
        """A forward with gradients begins."""
        rank = self._reducer.rank
        if self._token is None:
            raise ConfigurationError(
                f"Rank {rank}: a wrapper with shards={self._policy.count} is trained inside of "
                "`for micro in ddp.shards(batch):`. Run evaluations under torch.no_grad()."
            )
        self._forwards[self.shares.owned[self._position]] += 1
        weight = self._reducer.runner.weight
        if weight is not None and self._meeting.turns is not None:
            raise ConfigurationError(
                f"Rank {rank}: weighted(n) and a SyncBatchNorm over shards exclude each other: the "
                "backward mixes what shards bring, before it can be weighted. Multiply each "
                "shard's loss with n V / sum(n) of all V shards instead."
            )
        if self._position and (weight is None) != (self._sums.weight is None):
            raise ConfigurationError(
                f"Rank {rank}: some shards of a round are inside of weighted(n), and some are not. "
                "Use it for all, or for none."
            )
        self._weight = weight
        if weight is not None:
            if weight != int(weight):
                raise ConfigurationError(
                    f"Rank {rank}: weighted({weight}) with shards: take whole numbers, such as "
                    "samples or tokens, whose sum is exact in any order."
                )
            self._sums.weight = (self._sums.weight or 0.0) + weight

    def on_output(self, output: Any) -> None:
        """A forward with gradients has ended."""
        if self._token is not None:
            self._record.take_output(self._sums.shares.owned[self._position], output)

    # --- accumulation --------------------------------------------------------------------------

    def _take_old(self) -> Gradients:
        """Take gradients of earlier rounds away; what the round brings is added to them."""
        parameters = self._reducer.parameters
        before: Gradients = [parameter.grad for parameter in parameters]
        is_overwritten = self._reducer.runner.context.policy.views is GradientViews.ALWAYS
        for index, parameter in enumerate(parameters):
            gradient = before[index]
            if is_overwritten and gradient is not None:
                before[index] = gradient.clone()
            parameter.grad = None
        return before

    def _add_old(self, before: Sequence[torch.Tensor | None]) -> None:
        with torch.no_grad():
            for parameter, old in zip(self._reducer.parameters, before, strict=True):
                if old is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = old
                elif old.is_sparse or parameter.grad.is_sparse:
                    parameter.grad = add_sparse(old, parameter.grad)
                else:
                    parameter.grad.add_(old)

    def _check(self, ddp: TorchDDP) -> None:
        rank, threads = self._reducer.rank, self._policy.threads
        if torch.get_num_threads() != threads:
            raise ConfigurationError(
                f"Rank {rank}: torch uses {torch.get_num_threads()} threads, but its shards are "
                f"pinned to {threads}, because kernels change their bits with it. Leave "
                "torch.set_num_threads alone, or give DistributedDataParallel "
                f"shards=paceline.Shards({self._policy.count}, threads={torch.get_num_threads()})."
            )
        if not ddp.require_backward_grad_sync and self._token is None:
            raise ConfigurationError(
                f"Rank {rank}: no_sync() and shards exclude each other. A round over shards is "
                "always reduced, and is added to the gradients that are there: to accumulate, run "
                "several rounds before optimizer.step()."
            )
