"""Every mistake has an error of its own: on every rank, with names, and the process goes on.

Each rank returns the errors it saw; they are looked at here. After every error of a step, the same
wrapper runs a good step, and its gradients are compared with single-process training.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from paceline import DistributedDataParallel as DDP
from paceline import PacelineError
from paceline.errors import (
    AutogradGradError,
    ConfigurationError,
    GradientMismatchError,
    GraphChangedError,
    GroupNotReadyError,
    HookAlreadyRegisteredError,
    HookNotCallableError,
    HookResultError,
    HookSignatureError,
    MeshError,
    ModelMismatchError,
    NotPicklableError,
    ParametersChangedError,
    ReadyTwiceError,
    StepError,
    UntrainableModuleError,
    UnusedParametersError,
)
from paceline.testing import run_ranks

Gradients = dict[str, torch.Tensor]


class Net(nn.Module):
    """Two branches, either of which a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.trunk = nn.Linear(4, 4)
        self.left = nn.Linear(4, 2)
        self.right = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, branches: Sequence[str] = ("left", "right")) -> Any:
        hidden = torch.tanh(self.trunk(x))
        return sum(getattr(self, name)(hidden) for name in branches)


def batch(rank: int) -> torch.Tensor:
    return torch.full((3, 4), 0.1 * (rank + 1))


def good_step(ddp: DDP, model: Callable[..., torch.Tensor] | None = None) -> Gradients:
    """Run a step that uses everything; return its gradients."""
    ddp.zero_grad()
    (model or ddp)(batch(dist.get_rank())).square().sum().backward()
    return {name: p.grad.clone() for name, p in ddp.module.named_parameters()}


def expected(ranks: int, build: Callable[[], nn.Module] = Net) -> Gradients:
    net = build()
    for rank in range(ranks):
        (net(batch(rank)).square().sum() / ranks).backward()
    return {name: p.grad for name, p in net.named_parameters()}


def error_of(action: Callable[[], Any]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None


def mentions(error: Exception | None, *words: object) -> bool:
    """Say whether all words are in the text; show the text if not."""
    missing = [str(word) for word in words if str(word) not in str(error)]
    assert not missing, f"{missing} not in {type(error).__name__}: {error}"
    return True


class TestModelDiffers:
    """Found at construction. Afterwards the group is usable: a good model can be wrapped."""

    @staticmethod
    def construct(
        build: Callable[[int], nn.Module], options: Callable[[int], dict[str, Any]] | None = None
    ) -> list[Exception | None]:
        def run() -> tuple[Exception | None, Gradients]:
            rank = dist.get_rank()
            error = error_of(lambda: DDP(build(rank), **(options(rank) if options else {})))
            return error, good_step(DDP(Net()))

        results = run_ranks(3, run)
        for error, after in results:
            assert isinstance(error, ModelMismatchError)
            torch.testing.assert_close(after, expected(3))
        return [error for error, _ in results]

    def test_in_a_shape(self) -> None:
        for error in self.construct(lambda rank: nn.Linear(4, 5 if rank == 2 else 3)):
            assert mentions(error, "'weight'", "[3, 4]", "[5, 4]", "rank 0", "rank 2")
            assert mentions(error, "same model on every rank")
            assert (error.rank, error.parameters) == (2, ("weight",))

    def test_in_a_dtype(self) -> None:
        def build(rank: int) -> nn.Module:
            return nn.Linear(4, 3, dtype=torch.float64 if rank == 1 else torch.float32)

        for error in self.construct(build):
            assert mentions(error, "'weight'", "float32", "float64", "rank 0", "rank 1")

    def test_in_strides(self) -> None:
        def build(rank: int) -> nn.Module:
            net = nn.Conv2d(2, 4, 3)
            return net.to(memory_format=torch.channels_last) if rank == 1 else net

        for error in self.construct(build):
            assert mentions(error, "'weight'", "stride", "rank 0", "rank 1")

    @pytest.mark.parametrize("longer", [0, 2])
    def test_in_the_number_of_parameters(self, longer: int) -> None:
        def build(rank: int) -> nn.Module:
            layers = 3 if rank == longer else 2
            return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))

        for error in self.construct(build):
            assert mentions(error, "2.weight", "2.bias", f"Only rank {longer}", "6", "4")

    def test_in_the_order(self) -> None:
        def build(rank: int) -> nn.Module:
            names = ["a", "b"] if rank == 0 else ["b", "a"]
            return nn.ModuleDict({name: nn.Linear(4, 4) for name in names})

        for error in self.construct(build):
            assert mentions(error, "'a.weight'", "'b.weight'", "rank 0", "rank 1")

    def test_in_an_extra_parameter(self) -> None:
        def build(rank: int) -> nn.Module:
            net = nn.Module()
            net.first = nn.Parameter(torch.ones(2))
            if rank == 1:
                net.extra = nn.Parameter(torch.ones(2))
            net.last = nn.Parameter(torch.ones(2))
            return net

        for error in self.construct(build):
            assert mentions(error, "extra", "Rank 0", "rank 1", "requires_grad")

    def test_in_what_is_trained(self) -> None:
        def build(rank: int) -> nn.Module:
            net = nn.Linear(4, 4)
            net.bias.requires_grad_(rank != 1)
            return net

        for error in self.construct(build):
            assert mentions(error, "bias", "Only rank 0", "rank 1")

    @pytest.mark.parametrize(
        ("argument", "values"),
        [
            ("bucket_cap_mb", (25, 1)),
            ("find_unused_parameters", (False, True)),
            ("static_graph", (False, True)),
            ("nonfinite", ("ignore", "skip")),
            ("missing_gradients", ("raise", "wait")),
        ],
    )
    def test_in_an_argument(self, argument: str, values: tuple[Any, Any]) -> None:
        name = "bucket" if argument == "bucket_cap_mb" else argument
        for error in self.construct(
            lambda rank: Net(), lambda rank: {argument: values[int(rank == 1)]}
        ):
            assert mentions(error, name, "on rank 0", "on rank 1", "same arguments on every rank")
            if argument != "bucket_cap_mb":
                assert mentions(error, values[0], values[1])


class TestPlanDiffers:
    """With ``init_sync=False`` nothing is compared at construction, but the first backward does."""

    def test_model_differs(self) -> None:
        def run() -> tuple[Exception | None, Gradients]:
            ddp = DDP(nn.Linear(4, 3 + dist.get_rank()), init_sync=False)
            error = error_of(lambda: ddp(torch.ones(1, 4)).sum().backward())
            return error, good_step(DDP(Net()))

        for error, after in run_ranks(2, run):
            assert isinstance(error, ModelMismatchError)
            assert mentions(error, "rank 0", "rank 1", "weight", "[3, 4]", "[4, 4]")
            torch.testing.assert_close(after, expected(2))

    def test_bucket_size_differs(self) -> None:
        def run() -> tuple[Exception | None, Gradients]:
            cap = (1e-6, 25)[dist.get_rank()]
            ddp = DDP(Net(), init_sync=False, bucket_cap_mb=cap, find_unused_parameters=True)
            error = error_of(lambda: ddp(batch(0)).sum().backward())
            return error, good_step(DDP(Net()))

        for error, after in run_ranks(2, run):
            assert isinstance(error, ModelMismatchError)
            assert mentions(error, "bucket", "rank 0", "rank 1")
            torch.testing.assert_close(after, expected(2))

    def test_same_plan_is_fine(self) -> None:
        def run() -> Gradients:
            return good_step(DDP(Net(), init_sync=False))

        for found in run_ranks(2, run):
            torch.testing.assert_close(found, expected(2))


class TestUnusedParameters:
    NAMES = ("right.weight", "right.bias")

    @staticmethod
    def run(
        ranks: int, uses: Callable[[int], Sequence[str]], **options: Any
    ) -> list[tuple[Exception | None, Gradients]]:
        def run() -> tuple[Exception | None, Gradients]:
            rank = dist.get_rank()
            ddp = DDP(Net(), **options)
            error = error_of(lambda: ddp(batch(rank), uses(rank)).sum().backward())
            return error, good_step(ddp)

        return run_ranks(ranks, run)

    def test_on_one_rank(self) -> None:
        results = self.run(3, lambda rank: ["left"] if rank == 1 else ["left", "right"])
        for error, after in results:
            assert isinstance(error, UnusedParametersError)
            assert mentions(error, *self.NAMES, "rank 1", "find_unused_parameters=True")
            assert "rank 0" not in str(error)
            assert "rank 2" not in str(error)
            assert error.rank == 1
            assert set(error.parameters) == set(self.NAMES)
            torch.testing.assert_close(after, expected(3))

    def test_on_all_ranks(self) -> None:
        for error, after in self.run(2, lambda rank: ["left"], bucket_cap_mb=1e-6):
            assert isinstance(error, UnusedParametersError)
            assert mentions(error, *self.NAMES, "rank 0: ", "rank 1: ")
            torch.testing.assert_close(after, expected(2))

    def test_different_ones_on_each_rank(self) -> None:
        for error, after in self.run(2, lambda rank: [("left", "right")[rank]]):
            assert isinstance(error, UnusedParametersError)
            lines = str(error).splitlines()
            for rank, name in ((0, "right"), (1, "left")):
                (line,) = (line for line in lines if line.startswith(f"  rank {rank}: "))
                assert f"{name}.weight" in line
            torch.testing.assert_close(after, expected(2))

    def test_in_a_later_step(self) -> None:
        """The first step brings all; in the third, after the rebuild, some stay away."""

        def run() -> tuple[Exception | None, Gradients]:
            rank = dist.get_rank()
            ddp = DDP(Net(), bucket_cap_mb=1e-6)
            good_step(ddp)
            good_step(ddp)
            uses = ["left"] if rank == 0 else ["left", "right"]
            error = error_of(lambda: ddp(batch(rank), uses).sum().backward())
            return error, good_step(ddp)

        for error, after in run_ranks(2, run):
            assert isinstance(error, UnusedParametersError)
            assert error.rank == 0
            torch.testing.assert_close(after, expected(2))

    def test_output_outside_of_the_loss(self) -> None:
        """With the flag on, what is missing is found by the engine, not by the graph: no error."""

        class TwoOutputs(Net):
            def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
                hidden = torch.tanh(self.trunk(x))
                return self.left(hidden), self.right(hidden)

        def run() -> bool:
            ddp = DDP(TwoOutputs(), find_unused_parameters=True)
            ddp(batch(0))[0].sum().backward()
            return ddp.module.right.weight.grad is None

        assert run_ranks(2, run) == [True, True]


class TestWaitForGradients:
    """``missing_gradients="wait"``: several backward passes may bring the gradients together."""

    @staticmethod
    def two_losses(ddp: DDP) -> tuple[torch.Tensor, torch.Tensor]:
        x = batch(dist.get_rank())
        return ddp(x, ["left"]).square().sum(), ddp(x, ["right"]).square().sum()

    def test_two_backwards_together(self) -> None:
        class Apart(nn.Module):
            """Two halves that share nothing, so that each backward brings one of them."""

            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(11)
                self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

            def forward(self, x: torch.Tensor) -> Any:
                return self.left(x), self.right(x)

        def run() -> tuple[list[Gradients], int]:
            ddp = DDP(Apart(), missing_gradients="wait")
            found = []
            for _ in range(3):
                ddp.zero_grad()
                left, right = ddp(batch(dist.get_rank()))
                left.square().sum().backward()
                right.square().sum().backward()
                found.append({n: p.grad.clone() for n, p in ddp.module.named_parameters()})
            return found, ddp.stats().steps

        net = Apart()
        for rank in range(2):
            left, right = net(batch(rank))
            ((left.square().sum() + right.square().sum()) / 2).backward()
        wanted = {name: p.grad for name, p in net.named_parameters()}
        for found, steps in run_ranks(2, run):
            assert steps == 3
            for one in found:
                torch.testing.assert_close(one, wanted)

    def test_next_forward_raises_if_they_never_come(self) -> None:
        def run() -> tuple[Exception | None, Exception | None, Gradients]:
            ddp = DDP(Net(), missing_gradients="wait")
            backward = error_of(lambda: ddp(batch(0), ["left"]).sum().backward())
            forward = error_of(lambda: ddp(batch(0)))
            return backward, forward, good_step(ddp)

        for backward, forward, after in run_ranks(2, run):
            assert backward is None
            assert isinstance(forward, UnusedParametersError)
            assert mentions(forward, "right.weight", "right.bias", "find_unused_parameters=True")
            torch.testing.assert_close(after, expected(2))


class TestModuleChanged:
    def test_parameter_added_after_construction(self) -> None:
        def run() -> tuple[Exception | None, Exception | None, Gradients]:
            ddp = DDP(Net())
            good_step(ddp)
            ddp.module.left.extra = nn.Parameter(torch.ones(2))
            on_parameter = error_of(lambda: ddp(batch(0)))
            del ddp.module.left.extra
            ddp.module.added = nn.Linear(2, 2)
            on_module = error_of(lambda: ddp(batch(0)))
            del ddp.module.added
            return on_parameter, on_module, good_step(ddp)

        for on_parameter, on_module, after in run_ranks(2, run):
            assert isinstance(on_parameter, ParametersChangedError)
            assert on_parameter.parameters == ("left.extra",)
            assert mentions(on_parameter, "left.extra", "wrap the module in a new")
            assert isinstance(on_module, ParametersChangedError)
            assert on_module.parameters == ("added.weight", "added.bias")
            torch.testing.assert_close(after, expected(2))

    def test_parameter_replaced_after_construction(self) -> None:
        """Same name, another tensor: it would never be reduced."""

        def run() -> tuple[Exception | None, Gradients]:
            ddp = DDP(Net())
            good_step(ddp)
            old = ddp.module.left.weight
            ddp.module.left.weight = nn.Parameter(torch.zeros(2, 4))
            error = error_of(lambda: good_step(ddp))
            ddp.module.left.weight = old
            return error, good_step(ddp)

        for error, after in run_ranks(2, run):
            assert isinstance(error, PacelineError)
            assert mentions(error, "left.weight")
            torch.testing.assert_close(after, expected(2))

    def test_frozen_parameter_made_trainable(self) -> None:
        def run() -> tuple[Exception | None, Gradients]:
            net = Net()
            net.left.bias.requires_grad_(False)
            ddp = DDP(net)
            ddp.module.left.bias.requires_grad_(True)
            error = error_of(lambda: good_step(ddp))
            return error, good_step(DDP(Net()))

        for error, after in run_ranks(2, run):
            assert isinstance(error, ParametersChangedError)
            assert mentions(error, "left.bias")
            torch.testing.assert_close(after, expected(2))

    @pytest.mark.parametrize("where", ["everywhere", "on rank 1"])
    def test_converted_after_construction(self, where: str) -> None:
        def convert(ddp: DDP, dtype: torch.dtype) -> Exception | None:
            good_step(ddp)
            ddp.zero_grad()
            x = batch(dist.get_rank())
            if where == "everywhere" or dist.get_rank() == 1:
                ddp.module.to(dtype)
                x = x.to(dtype)
            return error_of(lambda: ddp(x).sum().backward())

        def run() -> list[tuple[Exception | None, Gradients]]:
            results = []
            for dtype in (torch.float16, torch.float64):
                error = convert(DDP(Net()), dtype)
                results.append((error, good_step(DDP(Net()))))
            return results

        for results in run_ranks(2, run):
            for dtype, (error, after) in zip(("float16", "float64"), results, strict=True):
                assert isinstance(error, GradientMismatchError)
                assert mentions(error, "trunk.weight", "torch.float32", f"torch.{dtype}")
                assert mentions(error, "rank 1", "before it is wrapped")
                torch.testing.assert_close(after, expected(2))

    def test_converted_and_back_again(self) -> None:
        """Who undoes the conversion has the module that was wrapped, and can go on."""

        def run() -> tuple[Exception | None, Gradients | Exception]:
            ddp = DDP(Net())
            good_step(ddp)
            ddp.zero_grad()
            ddp.module.double()
            error = error_of(lambda: ddp(batch(0).double()).sum().backward())
            ddp.zero_grad()
            ddp.module.float()
            return error, good_step(ddp)

        for error, after in run_ranks(2, run):
            assert isinstance(error, GradientMismatchError)
            torch.testing.assert_close(after, expected(2))


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


class TestAutogradGrad:
    def test_for_parameters_raises(self) -> None:
        def run() -> tuple[Exception | None, Gradients]:
            ddp = DDP(Net())
            parameters = list(ddp.parameters())
            error = error_of(lambda: torch.autograd.grad(ddp(batch(0)).sum(), parameters))
            return error, good_step(ddp)

        for error, after in run_ranks(2, run):
            assert isinstance(error, AutogradGradError)
            assert mentions(error, "torch.autograd.grad", "backward()", "no_sync")
            torch.testing.assert_close(after, expected(2))

    def test_for_one_parameter_of_many_raises(self) -> None:
        def run() -> tuple[Exception | None, Gradients]:
            ddp = DDP(Net())
            last = ddp.module.right.bias
            error = error_of(lambda: torch.autograd.grad(ddp(batch(0)).sum(), [last]))
            return error, good_step(ddp)

        for error, after in run_ranks(2, run):
            assert isinstance(error, AutogradGradError)
            torch.testing.assert_close(after, expected(2))

    def test_under_no_sync_gives_local_gradients(self) -> None:
        def run() -> tuple[torch.Tensor, Gradients]:
            ddp = DDP(Net())
            with ddp.no_sync():
                loss = ddp(batch(dist.get_rank())).square().sum()
            (gradient,) = torch.autograd.grad(loss, [ddp.module.trunk.weight])
            return gradient, good_step(ddp)

        for rank, (gradient, after) in enumerate(run_ranks(2, run)):
            net = Net()
            net(batch(rank)).square().sum().backward()
            torch.testing.assert_close(gradient, net.trunk.weight.grad)
            torch.testing.assert_close(after, expected(2))

    def test_gradient_penalty_works(self) -> None:
        """autograd.grad for inputs, with a graph, then backward through its result."""

        def penalised(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_(True)
            output = model(x).square().sum()
            (gradient,) = torch.autograd.grad(output, [x], create_graph=True)
            return output + gradient.square().sum()

        def run() -> list[Gradients]:
            ddp = DDP(Net())
            found = []
            for _ in range(3):
                ddp.zero_grad()
                penalised(ddp, batch(dist.get_rank())).backward()
                found.append({n: p.grad.clone() for n, p in ddp.module.named_parameters()})
            return found

        net = Net()
        for rank in range(2):
            (penalised(net, batch(rank)) / 2).backward()
        wanted = {name: p.grad for name, p in net.named_parameters()}
        for found in run_ranks(2, run):
            for one in found:
                torch.testing.assert_close(one, wanted)


class TestStaticGraph:
    @staticmethod
    def run(
        first: Sequence[str], then: Callable[[int], Sequence[str]]
    ) -> list[tuple[Exception | None, Gradients]]:
        def run() -> tuple[Exception | None, Gradients]:
            rank = dist.get_rank()
            ddp = DDP(Net(), static_graph=True)
            for _ in range(2):
                ddp.zero_grad()
                ddp(batch(rank), first).square().sum().backward()
            error = error_of(lambda: ddp(batch(rank), then(rank)).square().sum().backward())
            ddp.zero_grad()
            ddp(batch(rank), first).square().sum().backward()
            return error, {
                n: p.grad.clone() for n, p in ddp.module.named_parameters() if p.grad is not None
            }

        return run_ranks(2, run)

    def test_used_first_and_not_later(self) -> None:
        for error, after in self.run(["left", "right"], lambda rank: ["left"]):
            assert isinstance(error, GraphChangedError)
            assert mentions(
                error, "right.weight", "rank 0", "rank 1", "find_unused_parameters=True instead"
            )
            torch.testing.assert_close(after, expected(2))

    def test_used_first_and_not_later_on_one_rank(self) -> None:
        results = self.run(
            ["left", "right"], lambda rank: ["left"] if rank == 1 else ["left", "right"]
        )
        for error, after in results:
            assert isinstance(error, GraphChangedError)
            assert error.rank == 1
            torch.testing.assert_close(after, expected(2))

    def test_unused_first_and_used_later(self) -> None:
        for error, after in self.run(["left"], lambda rank: ["left", "right"]):
            assert isinstance(error, GraphChangedError)
            assert mentions(error, "right", "rank 0", "rank 1", "find_unused_parameters=True")
            assert "left.weight" in after

    def test_used_more_often_later(self) -> None:
        def run() -> tuple[Exception | None, Gradients, Gradients]:
            ddp = DDP(Repeated(), static_graph=True)
            x = batch(dist.get_rank()).requires_grad_()
            ddp(x, times=1).sum().backward()
            ddp.zero_grad()
            error = error_of(lambda: ddp(x, times=2).sum().backward())
            return error, good_step(ddp, lambda x: ddp(x, times=1)), repeated(times=1)

        for error, after, wanted in run_ranks(2, run):
            assert isinstance(error, GraphChangedError)
            assert mentions(error, "trunk", "rank 0", "rank 1")
            torch.testing.assert_close(after, wanted)


class Repeated(Net):
    """Runs its trunk several times under reentrant checkpointing, behind a first layer or not."""

    def __init__(self, stem: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4) if stem else nn.Identity()

    def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:  # type: ignore[override]
        x = self.stem(x.requires_grad_())
        for _ in range(times):
            x = checkpoint(self.trunk, x, use_reentrant=True)
        return self.left(x) + self.right(x)


def repeated(times: int, stem: bool = True) -> Gradients:
    """What one process computes. In the ranks: checkpoint() changes the environment."""
    net = Repeated(stem)
    for rank in range(2):
        (net(batch(rank), times).square().sum() / 2).backward()
    return {name: p.grad for name, p in net.named_parameters()}


class TestReadyTwice:
    @pytest.mark.parametrize("stem", [True, False], ids=["in the middle", "last of all"])
    def test_reentrant_checkpoint_used_twice(self, stem: bool) -> None:
        """Without a stem, the second gradient comes when every bucket is on its way already."""

        def run() -> tuple[Exception | None, Gradients, Gradients]:
            ddp = DDP(Repeated(stem))
            error = error_of(lambda: ddp(batch(dist.get_rank())).sum().backward())
            return error, good_step(ddp, lambda x: ddp(x, times=1)), repeated(1, stem)

        for rank, (error, after, wanted) in enumerate(run_ranks(2, run)):
            assert isinstance(error, ReadyTwiceError)
            assert mentions(error, "trunk", f"rank {rank}")
            assert mentions(error, "static_graph=True", "use_reentrant=False")
            torch.testing.assert_close(after, wanted)

    def test_static_graph_is_the_remedy(self) -> None:
        def run() -> tuple[list[Gradients], Gradients]:
            ddp = DDP(Repeated(), static_graph=True)
            return [good_step(ddp) for _ in range(3)], repeated(times=2)

        for found, wanted in run_ranks(2, run):
            for one in found:
                torch.testing.assert_close(one, wanted)


class TestArguments:
    """Wrong arguments, one rank each: what to write instead is in the text."""

    def test_group_not_initialised(self) -> None:
        (error,) = run_ranks(1, lambda: error_of(lambda: DDP(Net())), init=False)
        assert isinstance(error, GroupNotReadyError)
        assert mentions(error, "torch.distributed.init_process_group(", "torchrun")

    def test_device_ids_for_a_cpu_module(self) -> None:
        def run() -> list[Exception | None]:
            return [
                error_of(lambda: DDP(Net(), device_ids=[0])),
                error_of(lambda: DDP(Net(), output_device="cuda:1")),
                error_of(lambda: DDP(Net(), device_ids=[0, 1])),
            ]

        ((ids, output, several),) = run_ranks(1, run)
        assert isinstance(ids, ConfigurationError)
        assert mentions(ids, "device_ids [0]", "cpu", "DistributedDataParallel(module)")
        assert isinstance(output, ConfigurationError)
        assert mentions(output, "output_device cuda:1", "cpu")
        assert isinstance(several, ConfigurationError)
        assert mentions(several, "[0, 1]")

    def test_module_on_two_device_types(self) -> None:
        def run() -> Exception | None:
            net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
            return error_of(lambda: DDP(net))

        (error,) = run_ranks(1, run)
        assert isinstance(error, ConfigurationError)
        assert mentions(error, "cpu", "meta", "module.to('cpu')")

    def test_lazy_parameters(self) -> None:
        def run() -> tuple[Exception | None, bool]:
            net = nn.Sequential(nn.LazyLinear(3))
            error = error_of(lambda: DDP(net))
            net(torch.ones(1, 4))
            DDP(net)(torch.ones(1, 4)).sum().backward()
            return error, net[0].weight.grad is not None

        ((error, is_trained),) = run_ranks(1, run)
        assert isinstance(error, UntrainableModuleError)
        assert mentions(error, "lazy", "Run one batch through the module")
        assert is_trained

    def test_nothing_to_train(self) -> None:
        def run() -> list[Exception | None]:
            return [
                error_of(lambda: DDP(Net().requires_grad_(False))),
                error_of(lambda: DDP(nn.Tanh())),
            ]

        (errors,) = run_ranks(1, run)
        for error in errors:
            assert isinstance(error, UntrainableModuleError)
            assert mentions(error, "any parameter that requires a gradient", "requires_grad")

    def test_meshes(self) -> None:
        def run() -> tuple[Exception | None, Exception | None, Gradients]:
            flat = init_device_mesh("cpu", (2,))
            square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "dp"))
            both = error_of(lambda: DDP(Net(), process_group=dist.group.WORLD, device_mesh=flat))
            two = error_of(lambda: DDP(Net(), device_mesh=square))
            return both, two, good_step(DDP(Net(), device_mesh=flat))

        for both, two, after in run_ranks(2, run):
            assert isinstance(both, MeshError)
            assert mentions(both, "process_group and device_mesh", "Leave one of them out")
            assert isinstance(two, MeshError)
            assert mentions(two, "1D", "device_mesh['dp']")
            torch.testing.assert_close(after, expected(2))

    def test_group_of_others(self) -> None:
        def run() -> Exception | None:
            group = dist.new_group([0])
            if dist.get_rank() == 0:
                return None
            return error_of(lambda: DDP(Net(), process_group=group))

        _, error = run_ranks(2, run)
        assert isinstance(error, ConfigurationError)
        assert mentions(error, "process_group", "new_group")

    def test_half_of_the_delay_arguments(self) -> None:
        def run() -> list[Exception | None]:
            net = Net()
            named = [("left.weight", net.left.weight)]
            return [
                error_of(lambda: DDP(net, delay_all_reduce_named_params=named)),
                error_of(lambda: DDP(net, param_to_hook_all_reduce=net.left.weight)),
            ]

        (errors,) = run_ranks(1, run)
        for error in errors:
            assert isinstance(error, ConfigurationError)
            assert mentions(error, "delay_all_reduce_named_params", "param_to_hook_all_reduce")
            assert mentions(error, "Give both, or neither")

    def test_strings_that_are_not_known(self) -> None:
        def run() -> list[Exception | None]:
            return [
                error_of(lambda: DDP(Net(), nonfinite="stop")),
                error_of(lambda: DDP(Net(), missing_gradients="ignore")),
            ]

        ((nonfinite, missing),) = run_ranks(1, run)
        assert isinstance(nonfinite, ConfigurationError)
        assert mentions(nonfinite, "nonfinite='stop'", "'ignore', 'raise', 'skip'")
        assert isinstance(missing, ConfigurationError)
        assert mentions(missing, "missing_gradients='ignore'", "'raise', 'wait'")

    def test_dtypes_without_arithmetic(self) -> None:
        def run() -> list[Exception | None]:
            low = torch.float8_e4m3fn
            precision = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=low)
            net, own = Net(), Net()
            own.left.bias = nn.Parameter(own.left.bias.detach().to(low))
            errors = [
                error_of(lambda: DDP(net, mixed_precision=precision)),
                error_of(lambda: DDP(own)),
            ]
            assert not hasattr(net.trunk.weight, "_mp_param")  # nothing was begun
            return errors

        ((reduced, own),) = run_ranks(1, run)
        for error, name in ((reduced, "trunk.weight"), (own, "left.bias")):
            assert isinstance(error, ConfigurationError)
            assert mentions(error, name, "torch.float8_e4m3fn", "torch.bfloat16", "'e4m3'")

    def test_bucket_sizes_that_are_none(self) -> None:
        def run() -> list[Exception | None]:
            return [
                error_of(lambda: DDP(Net(), bucket_cap_mb=-1)),
                error_of(lambda: DDP(Net(), bucket_cap_mb=float("nan"))),
                error_of(lambda: DDP(Net(), bucket_cap_mb_list=[1, -1])),
            ]

        (errors,) = run_ranks(1, run)
        for error in errors:
            assert isinstance(error, ConfigurationError)
            assert mentions(error, "bucket_cap_mb")


class TestPickling:
    def test_needs_the_default_group(self) -> None:
        def run() -> tuple[Exception | None, Gradients, Gradients]:
            other = DDP(Net(), process_group=dist.new_group())
            error = error_of(lambda: pickle.dumps(other))
            copy = pickle.loads(pickle.dumps(DDP(Net())))
            return error, good_step(other), good_step(copy)

        for error, after, of_copy in run_ranks(2, run):
            assert isinstance(error, NotPicklableError)
            assert mentions(error, "default process group", "ddp.module.state_dict()")
            torch.testing.assert_close(after, expected(2))
            torch.testing.assert_close(of_copy, expected(2))
