"""A communication hook that cannot be called, or fails, has an error of its own on every rank."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline import DistributedDataParallel as DDP
from paceline.errors import (
    HookAlreadyRegisteredError,
    HookNotCallableError,
    HookResultError,
    HookSignatureError,
    StepError,
)
from paceline.testing import run_ranks
from tests.ddp.agree.error_cases import (
    Gradients,
    Net,
    batch,
    error_of,
    expected,
    good_step,
    mentions,
)


class TestHookArguments:
    def test_refused_at_registration(self) -> None:
        def no_bucket(state):  # type: ignore[no-untyped-def]
            """Too few."""

        def three(state, bucket, more):  # type: ignore[no-untyped-def]
            """Too many."""

        def wrong_bucket(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]:
            raise NotImplementedError

        def wrong_return(state: object, bucket: dist.GradBucket) -> torch.Tensor:
            raise NotImplementedError

        def not_a_string(state, bucket):  # type: ignore[no-untyped-def]
            """Annotations that are objects, as without `from __future__ import annotations`."""

        not_a_string.__annotations__ = {"bucket": int}

        def run() -> tuple[list[Exception | None], Gradients]:
            ddp = DDP(Net())
            hooks = ("allreduce", no_bucket, three, wrong_bucket, wrong_return, not_a_string)
            errors = [error_of(lambda h=h: ddp.register_comm_hook(None, h)) for h in hooks]
            return errors, good_step(ddp)

        for errors, after in run_ranks(2, run):
            not_callable, few, many, bucket, returns, typed = errors
            assert isinstance(not_callable, HookNotCallableError)
            assert mentions(not_callable, "'allreduce'", "str", "def hook(state")
            for error, name in ((few, "no_bucket"), (many, "three")):
                assert isinstance(error, HookSignatureError)
                assert mentions(error, name, "hook(state, bucket)", "def hook(state")
            for error, name in ((bucket, "wrong_bucket"), (typed, "not_a_string")):
                assert isinstance(error, HookSignatureError)
                assert mentions(error, name, "int", "dist.GradBucket")
            assert isinstance(returns, HookSignatureError)
            assert mentions(returns, "wrong_return", "torch.futures.Future[torch.Tensor]")
            torch.testing.assert_close(after, expected(2))

    def test_annotations_that_say_the_right_thing_in_other_words(self) -> None:
        def qualified(
            state: object, bucket: torch.distributed.GradBucket
        ) -> torch.futures.Future[torch.Tensor]:
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future()

        def anything(state: Any, bucket: Any) -> Any:
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future()

        def run() -> list[Exception | None]:
            return [
                error_of(lambda hook=hook: DDP(Net()).register_comm_hook(None, hook))
                for hook in (qualified, anything)
            ]

        assert run_ranks(1, run) == [[None, None]]

    def test_registered_twice(self) -> None:
        def mean(state, bucket):  # type: ignore[no-untyped-def]
            buffer = bucket.buffer().div_(dist.get_world_size())
            future = dist.all_reduce(buffer, async_op=True).get_future()
            return future.then(lambda done: done.value()[0])

        def second(state, bucket):  # type: ignore[no-untyped-def]
            raise NotImplementedError

        def run() -> tuple[Exception | None, Gradients]:
            ddp = DDP(Net())
            ddp.register_comm_hook(None, mean)
            error = error_of(lambda: ddp.register_comm_hook(None, second))
            return error, good_step(ddp)

        for error, after in run_ranks(2, run):
            assert isinstance(error, HookAlreadyRegisteredError)
            assert mentions(error, "mean", "second", "only be called once")
            torch.testing.assert_close(after, expected(2))


def done(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


class TestHookResults:
    """A hook that misbehaves in one step; in the next it averages as it should."""

    @staticmethod
    def run(
        misbehave: Callable[[Any], Any], *, on_rank: int | None = None
    ) -> list[tuple[Exception | None, Gradients]]:
        """Let a hook do `misbehave(bucket)`; the others reduce meanwhile."""

        def hook(bad, bucket):  # type: ignore[no-untyped-def]
            if bad and on_rank in (None, dist.get_rank()):
                return misbehave(bucket)
            buffer = bucket.buffer().div_(dist.get_world_size())
            future = dist.all_reduce(buffer, async_op=True).get_future()
            return future.then(lambda work: work.value()[0])

        def run() -> tuple[Exception | None, Gradients]:
            ddp = DDP(Net(), bucket_cap_mb=1e-6)
            bad: list[int] = [1]
            ddp.register_comm_hook(bad, hook)
            error = error_of(lambda: ddp(batch(dist.get_rank())).sum().backward())
            bad.clear()
            return error, good_step(ddp)

        return run_ranks(2, run)

    def check(self, results: list[tuple[Exception | None, Gradients]], *words: str) -> None:
        for error, after in results:
            assert isinstance(error, HookResultError)
            assert mentions(error, *words, "torch.futures.Future")
            torch.testing.assert_close(after, expected(2))

    def test_no_future(self) -> None:
        self.check(self.run(lambda bucket: bucket.buffer()), "returned Tensor", "rank 0", "rank 1")

    def test_none(self) -> None:
        self.check(self.run(lambda bucket: None), "returned NoneType")

    def test_future_of_something_else(self) -> None:
        self.check(self.run(lambda bucket: done("sum")), "holds str")

    def test_future_with_a_wrong_size(self) -> None:
        self.check(self.run(lambda bucket: done(torch.ones(3))), "3 elements", "bucket 0")

    def test_raises(self) -> None:
        """Before it started a collective: the rank cannot know where its peers are."""

        def misbehave(bucket: Any) -> Any:
            raise KeyError("no such state")

        results = self.run(misbehave)
        self.check(results, "KeyError", "no such state")
        for rank, (error, _) in enumerate(results):
            assert error is not None
            assert mentions(error, f"rank {rank}")

    def test_future_raises(self) -> None:
        def misbehave(bucket: Any) -> Any:
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_exception(ArithmeticError("too large"))
            return future

        self.check(self.run(misbehave), "too large", "rank 0", "rank 1")

    def test_raises_on_one_rank_after_its_collective(self) -> None:
        def misbehave(bucket: Any) -> Any:
            dist.all_reduce(bucket.buffer())
            raise KeyError("only here")

        self.check(self.run(misbehave, on_rank=1), "rank 1", "only here")

    @pytest.mark.slow
    def test_raises_on_one_rank_before_its_collective(self) -> None:
        """The peer's hook is in an all-reduce that this rank never enters: both get out."""

        def hook(state, bucket):  # type: ignore[no-untyped-def]
            if dist.get_rank() == 1:
                raise KeyError("only here")
            return dist.all_reduce(bucket.buffer(), group=state, async_op=True).get_future()

        def run() -> Exception | None:
            group = dist.new_group(timeout=timedelta(seconds=3))
            ddp = DDP(Net(), process_group=group)
            ddp.register_comm_hook(group, hook)
            return error_of(lambda: ddp(batch(dist.get_rank())).sum().backward())

        waiting, failed = run_ranks(2, run)
        assert isinstance(waiting, StepError)
        assert isinstance(failed, HookResultError)
        assert mentions(failed, "rank 1", "only here")
