"""Arguments that cannot work have errors that say what to write instead."""

from __future__ import annotations

import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel.distributed import _MixedPrecision

from paceline import DistributedDataParallel as DDP
from paceline.errors import (
    ConfigurationError,
    GroupNotReadyError,
    MeshError,
    NotPicklableError,
    UntrainableModuleError,
)
from paceline.testing import run_ranks
from tests.ddp.agree.error_cases import Gradients, Net, error_of, expected, good_step, mentions


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
