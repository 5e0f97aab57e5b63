"""The base of stateful hooks: steps, what is remembered, checkpoints that resume bit for bit.

Subclasses say what their rounds are; here is when they run. Knows buckets, schedulers and memory;
must not know any codec.

[Note: a resumed first step]
After the first step, wrappers cut their buckets anew, and compression depends on the cut: blocks,
slices and the k largest are those of a bucket. A resumed run starts with the first cut again, where
the run that never stopped had the second. So in its first step, a state that was loaded holds the
buckets back until the last is there, puts their gradients into the cut that was saved, and runs on
that: the same bits. One step without overlap is the price. If the model's buckets turn out
otherwise (another bucket size, say), what is remembered moves with the parameters, and all that is
lost is that the bits are the same.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from paceline.errors import ConfigurationError
from paceline.hooks.interface import (
    HookBucket,
    TensorFuture,
    after,
    check_gradients,
    failed_future,
    group_of,
    raising,
    start_all_reduce,
)
from paceline.hooks.layout import BucketView, Memory, Numbers, ParameterNumbers
from paceline.hooks.round_scheduler import Rounds, RoundScheduler, scheduler_of

VERSION = 1


class HookState(abc.ABC):
    """State of a hook whose buckets run on a scheduler.

    Args:
        process_group: What to reduce over; None is the default group.

    Attributes:
        process_group: May be set until the first step.
        step: How many steps have been reduced.
    """

    ROUNDS: ClassVar[int]
    """The most collectives that one bucket needs, one after the other."""

    NAME: ClassVar[str]
    """What errors call it."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.step = 0
        self.memory = Memory()
        self._numbers = ParameterNumbers()
        self._scheduler: RoundScheduler | None = None
        self._layouts: list[Numbers] = []  # of the latest step
        self._saved_layouts: list[Numbers] = []  # not yet seen again
        self._held: _HeldStep | None = None
        self._mark: tuple[Any, ...] | None = None

    @abc.abstractmethod
    def rounds(self, view: BucketView, step: int) -> Rounds:
        """Reduce one bucket: leave the mean in ``view.values`` and return them.

        Runs on the scheduler's thread, up to each collective that it yields.
        """

    @property
    def first_step(self) -> int:
        """The first step that :meth:`rounds` is for; those before it are a plain all-reduce."""
        return 0

    # --- running -------------------------------------------------------------------------------

    def run(self, bucket: HookBucket) -> TensorFuture:
        """Reduce a bucket. What the hook function calls."""
        buffer = check_gradients(self.NAME, bucket)
        view = BucketView.of(bucket, self._numbers)
        future = self._submit_or_hold(view)
        self.step += view.is_last
        if buffer.is_complex():
            return after(future, lambda: buffer)
        return future

    @property
    def group(self) -> dist.ProcessGroup:
        """The group whose ranks reduce with each other."""
        return group_of(self.process_group)

    def _submit_or_hold(self, view: BucketView) -> TensorFuture:
        if self._held is None and _is_cut_otherwise(view, self._saved_layouts):
            self._held = _HeldStep(self._saved_layouts[view.index :])
        future = self.submit(view) if self._held is None else self._held.add(view)
        if view.is_last:
            held, self._held, self._saved_layouts = self._held, None, []
            if held is not None:
                held.release(self.submit)
        return future

    def submit(self, view: BucketView) -> TensorFuture:
        """Send a bucket on its way."""
        if self._scheduler is None:
            self._scheduler = scheduler_of(self.group, self.ROUNDS)
        self._layouts[view.index :] = [view.numbers]
        what = f"{self.NAME} of bucket {view.index}"
        is_uncompressed = self.step < self.first_step
        rounds = (
            _uncompressed_rounds(view, self.group)
            if is_uncompressed
            else self.rounds(view, self.step)
        )
        return self._scheduler.submit(what, rounds)

    # --- going back: elastic training ----------------------------------------------------------

    def mark(self) -> None:
        """The latest step counts: :meth:`roll_back` comes back to here. Copies no tensor."""
        self.memory.undo.mark()
        self._mark = (self.step, list(self._layouts), self.memory.contents(), self._extra_mark())

    def roll_back(self) -> None:
        """Forget all steps since the mark, also one that failed. No bucket may be on its way."""
        if self._mark is None:
            return
        self.memory.undo.roll_back()
        self.step, layouts, contents, extra = self._mark
        self._layouts = list(layouts)
        self.memory.set_contents(contents)
        self._set_extra_mark(extra)

    def change_group(self, group: dist.ProcessGroup) -> None:
        """Go on with other ranks. No bucket may be on its way.

        The wrapper begins with the buckets of its construction again, so this is a resumed first
        step. What this rank has left out stays with it.
        """
        self.process_group = group
        self._scheduler = self._held = None
        self._saved_layouts = list(self._layouts)

    def shared_state(self) -> dict[str, Any]:
        """Return the part of the state that is the same on all ranks: for one that joins."""
        return {
            "version": VERSION,
            "hook": self.NAME,
            "step": self.step,
            "layouts": [list(numbers) for numbers in self._layouts],
            "extra": self._shared_extra(),
        }

    def load_shared_state(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`shared_state` gave on another rank. What this rank left out stays.

        Raises:
            ConfigurationError: It belongs to another hook.
        """
        _check_saved({"rank": None, **state}, self.NAME, None)
        self.step = int(state["step"])
        self._layouts = [tuple(numbers) for numbers in state["layouts"]]
        self._saved_layouts = list(self._layouts)
        self._load_shared_extra(state["extra"])

    def forget_feedback(self) -> None:
        """Forget what this rank has left out: it was sent already, or belongs to nobody."""
        self.memory.load_state_dict({})
        self.memory.undo.forget()
        self._mark = None

    def _extra_mark(self) -> Any:
        """Which tensors and numbers a subclass has, its tensors not copied."""
        return None

    def _set_extra_mark(self, extra: Any) -> None:
        assert extra is None

    def _shared_extra(self) -> dict[str, Any]:
        return {}

    def _load_shared_extra(self, extra: Mapping[str, Any]) -> None:
        assert not extra

    # --- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, copied. It is this rank's own: save one per rank."""
        group = self.group if dist.is_initialized() else None
        return {
            "version": VERSION,
            "hook": self.NAME,
            "rank": None if group is None else group.rank(),
            "world": None if group is None else group.size(),
            "step": self.step,
            "layouts": [list(numbers) for numbers in self._layouts],
            "memory": self.memory.state_dict(),
            "extra": self._extra_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, on the same rank of as many.

        Raises:
            ConfigurationError: It belongs to another hook, rank or number of ranks.
        """
        group = self.group if dist.is_initialized() else None
        _check_saved(state, self.NAME, group)
        self._restore(state)

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.step = int(state["step"])
        self._layouts = [tuple(numbers) for numbers in state["layouts"]]
        self._saved_layouts = list(self._layouts)
        self.memory.load_state_dict(state["memory"])
        self._load_extra_state(state["extra"])

    def _extra_state(self) -> dict[str, Any]:
        return {}

    def _load_extra_state(self, extra: Mapping[str, Any]) -> None:
        assert not extra

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without group, scheduler and the model's parameters; numbers are found again."""
        kept = {k: v for k, v in self.__dict__.items() if k not in _NOT_PICKLED}
        return {"settings": kept, "state": self.state_dict()}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        HookState.__init__(self)
        self.__dict__.update(pickled["settings"])
        self._after_unpickling()
        # Not checked: the group is not pickled, so which rank this is will be known later.
        self._restore(pickled["state"])

    def _after_unpickling(self) -> None:  # noqa: B027 - most have nothing to do
        """Make again what is not pickled."""


_NOT_PICKLED = {
    "process_group",
    "memory",
    "_numbers",
    "_scheduler",
    "_layouts",
    "_saved_layouts",
    "_held",
    "_mark",
}


def _is_cut_otherwise(view: BucketView, saved: Sequence[Numbers]) -> bool:
    """See [Note: a resumed first step]."""
    return bool(saved) and (view.index >= len(saved) or saved[view.index] != view.numbers)


def _check_saved(state: Mapping[str, Any], hook: str, group: dist.ProcessGroup | None) -> None:
    expected: dict[str, Any] = {"version": VERSION, "hook": hook}
    if group is not None and state.get("rank") is not None:
        expected |= {"rank": group.rank(), "world": group.size()}
    for key, value in expected.items():
        if state.get(key) != value:
            raise ConfigurationError(
                f"{hook}.load_state_dict: {key} is {state.get(key)!r} in what was saved and "
                f"{value!r} here. Every rank loads what the same rank of as many has saved; "
                "otherwise begin with a new state, whose error feedback is empty."
            )


def _uncompressed_rounds(view: BucketView, group: dist.ProcessGroup) -> Rounds:
    """Reduce a bucket without compression."""
    view.values.div_(group.size())
    yield lambda on: start_all_reduce(view.values, on)
    return view.values


class _HeldStep:
    """Buckets of a step that wait for the last, to be cut as they were when they were saved."""

    def __init__(self, layouts: Sequence[Numbers]) -> None:
        self._layouts = layouts
        self._views: list[BucketView] = []
        self._futures: list[TensorFuture] = []

    def add(self, view: BucketView) -> TensorFuture:
        """Hold a bucket back."""
        self._views.append(view)
        self._futures.append(torch.futures.Future())
        return raising(self._futures[-1])

    def release(self, submit: Callable[[BucketView], TensorFuture]) -> None:
        """Run what was held: in the saved cut if it has the same parameters, else as it came."""
        held = sorted(number for view in self._views for number in view.numbers)
        views = self._views
        if held == sorted(number for numbers in self._layouts for number in numbers):
            views = self._recut()
        done = torch.futures.collect_all([submit(view) for view in views])
        done.add_done_callback(lambda all_done: self._finish(views, all_done))

    def _recut(self) -> list[BucketView]:
        first = self._views[0].index
        pieces = {
            number: (piece, shape)
            for view in self._views
            for number, piece, shape in zip(
                view.numbers, view.pieces(view.values), view.shapes, strict=True
            )
        }
        views = []
        for offset, numbers in enumerate(self._layouts):
            values = torch.cat([pieces[number][0] for number in numbers])
            shapes = tuple(pieces[number][1] for number in numbers)
            is_last = offset == len(self._layouts) - 1
            views.append(BucketView(first + offset, values, numbers, shapes, is_last))
        return views

    def _finish(self, views: list[BucketView], all_done: torch.futures.Future[Any]) -> None:
        try:
            all_done.wait()
            results = {
                number: piece
                for view in views
                for number, piece in zip(view.numbers, view.pieces(view.values), strict=True)
            }
            for view in self._views if views is not self._views else []:
                for number, piece in zip(view.numbers, view.pieces(view.values), strict=True):
                    piece.copy_(results[number])
        except Exception as error:
            for future in self._futures:
                failed_future(future, error)
            return
        for view, future in zip(self._views, self._futures, strict=True):
            future.set_result(view.values)
