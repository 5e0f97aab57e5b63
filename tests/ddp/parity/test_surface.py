"""What else torch's class has: ignore lists, logging, regrouping, pickling, meshes."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from paceline import DistributedDataParallel as DDP
from paceline.errors import NotPicklableError
from paceline.testing import run_ranks
from tests.ddp.compare import (
    TorchDDP,
    assert_close,
    assert_identical,
    assert_same_on_all_ranks,
    batch,
    gradients,
    pair,
    reference_gradients,
    step_both,
    train_both,
)
from tests.ddp.models import Normed, mlp, seeded


class TestIgnoreLists:
    def test_parameters_and_buffers_stay_local(self) -> None:
        def on_rank() -> None:
            rank = dist.get_rank()
            model = seeded(Normed, seed=rank)
            own = model.linear.weight.detach().clone()
            names = ["linear.weight", "norm.running_mean"]
            for wrap in (DDP, TorchDDP):
                each = copy.deepcopy(model)
                with torch.no_grad():
                    each.norm.running_mean.fill_(rank)
                wrap._set_params_and_buffers_to_ignore_for_model(each, names)
                ddp = wrap(each)
                assert torch.equal(each.linear.weight, own), "not broadcast"
                assert each.norm.running_mean[0] == rank
                ddp(batch(0)).square().mean().backward()
                plain = copy.deepcopy(each)
                plain.zero_grad()
                plain(batch(0)).square().mean().backward()
                found = gradients(ddp)
                assert_close(
                    {"own": found["linear.weight"]}, {"own": gradients(plain)["linear.weight"]}
                )
                assert_same_on_all_ranks({"bias": found["linear.bias"]})

        run_ranks(2, on_rank)

    def test_equals_torch(self) -> None:
        def on_rank() -> None:
            model = mlp(4)
            DDP._set_params_and_buffers_to_ignore_for_model(model, ["2.weight"])
            ours, theirs = pair(model)
            train_both(ours, theirs)
            names = [spec.parameters for spec in ours.stats().buckets]
            assert "2.weight" not in [name for bucket in names for name in bucket]

        run_ranks(2, on_rank)


class TestLogging:
    # torch's keys for one rank on gloo, with times that exist on the CPU.
    DYNAMIC = (
        "forward_compute_time",
        "backward_compute_time",
        "backward_comm_time",
        "backward_compute_comm_overlap_time",
        "avg_forward_compute_time",
        "avg_backward_compute_time",
        "avg_backward_comm_time",
        "avg_backward_compute_comm_overlap_time",
    )

    def test_keys_and_values(self) -> None:
        def on_rank() -> None:
            ours, theirs = pair(mlp(4), bucket_cap_mb=1e-4)
            train_both(ours, theirs, 4)
            mine, torchs = ours._get_ddp_logging_data(), theirs._get_ddp_logging_data()
            missing = sorted(set(torchs) - set(mine))
            assert missing == [], f"keys that only torch has: {missing}"
            different = {
                key: (mine[key], value)
                for key, value in torchs.items()
                if "time" not in key and mine[key] != value
            }
            # Until the first step, torch has buckets by guess, and we have one.
            different.pop("bucket_sizes", None)
            assert different == {}

        run_ranks(2, on_rank)

    def test_times(self) -> None:
        def on_rank() -> None:
            ddp = DDP(mlp(4))
            for step in range(4):
                ddp(batch(step)).mean().backward()
            data = ddp._get_ddp_logging_data()
            for key in self.DYNAMIC:
                assert data[key] >= 0, key
            for key in ("forward_compute_time", "backward_compute_time", "backward_comm_time"):
                assert data[key] > 0, key
            assert data["backward_compute_time_end"] > data["backward_compute_time_start"]
            assert data["backward_compute_time_start"] > data["forward_compute_time_start"]

        run_ranks(2, on_rank)

    def test_sample_rate(self) -> None:
        def on_rank() -> list[int]:
            ddp = DDP(mlp(4))
            ddp._set_ddp_runtime_logging_sample_rate(5)
            seen = []
            for step in range(18):
                ddp(batch(step)).mean().backward()
                seen.append(ddp._get_ddp_logging_data().get("iteration", 0))
            with pytest.raises(ValueError, match="equal or greater than 1"):
                ddp._set_ddp_runtime_logging_sample_rate(0)
            return seen

        expected = [*range(11), 10, 10, 10, 10, 15, 15, 15]
        assert run_ranks(2, on_rank) == [expected] * 2

    def test_can_set_static_graph(self) -> None:
        from tests.ddp.models import Branches

        def on_rank() -> list[int]:
            seen = []
            for uses in (["ab"] * 3, ["ab", "a", "ab"]):
                ddp = DDP(Branches("ab"), find_unused_parameters=True)
                for step, names in enumerate(uses):
                    ddp(batch(step), names).mean().backward()
                seen.append(ddp._get_ddp_logging_data()["can_set_static_graph"])
            return seen

        assert run_ranks(2, on_rank) == [[1, 0]] * 2


class TestRegrouping:
    def test_smaller_group_between_steps(self) -> None:
        def on_rank() -> None:
            rank = dist.get_rank()
            pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
            ddp = DDP(mlp(4), bucket_cap_mb=1e-4)
            for members in ([0, 1, 2], [0, 1], [1, 2], [0, 1, 2]):
                if rank not in members:
                    continue
                group = dist.group.WORLD if len(members) == 3 else pairs[members[0]]
                ddp._update_process_group(group)
                for step in range(2):
                    ddp.zero_grad()
                    ddp(batch(step)).square().mean().backward()
                    plain = copy.deepcopy(ddp.module)
                    plain.zero_grad()
                    for each in members:
                        value = plain(batch(step, each)).square().mean() / len(members)
                        value.backward()
                    assert_close(gradients(ddp), gradients(plain), f"{members}:")

        run_ranks(3, on_rank)

    def test_options_survive(self) -> None:
        def on_rank() -> None:
            group = dist.new_group([0, 1])
            for options in ({"static_graph": True}, {"find_unused_parameters": True}):
                ddp = DDP(mlp(4), **options)
                for step in range(4):
                    if step == 2:
                        ddp._update_process_group(group)
                    ddp.zero_grad()
                    ddp(batch(step)).square().mean().backward()
                    expected = reference_gradients(
                        ddp, lambda m, rank, s=step: m(batch(s, rank)).square().mean()
                    )
                    assert_close(gradients(ddp), expected)

        run_ranks(2, on_rank)


class TestCopies:
    def test_pickle(self) -> None:
        def on_rank() -> None:
            ours, theirs = pair(seeded(Normed), bucket_cap_mb=1e-4)
            step_both(ours, theirs, lambda m: m(batch(0)).square().mean())
            loaded = []
            for ddp in (ours, theirs):
                file = io.BytesIO()
                torch.save(ddp, file)
                file.seek(0)
                loaded.append(torch.load(file, weights_only=False))
            assert type(loaded[0]) is DDP
            for step in range(1, 4):
                step_both(*loaded, lambda m, s=step: m(batch(s)).square().mean())
            assert loaded[0].stats().buckets[0].bytes < 200, "the cap came along"

        run_ranks(2, on_rank)

    def test_pickle_needs_the_default_group(self) -> None:
        def on_rank() -> None:
            ddp = DDP(mlp(4), process_group=dist.new_group([0, 1]))
            with pytest.raises(NotPicklableError, match="default process group"):
                torch.save(ddp, io.BytesIO())

        run_ranks(2, on_rank)

    def test_deepcopy_of_the_module_keeps_no_hook(self) -> None:
        def on_rank() -> None:
            ddp = DDP(mlp(4))
            ddp(batch(0)).mean().backward()
            twin, plain = copy.deepcopy(ddp.module), mlp(4)
            if dist.get_rank() == 0:  # alone: a reduction would hang
                for model in (twin, plain):
                    model.zero_grad()
                    model(batch(1)).square().mean().backward()
                assert_identical(gradients(twin), gradients(plain))

        run_ranks(2, on_rank)

    def test_deepcopy_of_the_wrapper(self) -> None:
        def on_rank() -> None:
            ddp = DDP(mlp(4), bucket_cap_mb=1e-4)
            ddp(batch(0)).mean().backward()
            twin = copy.deepcopy(ddp)
            for model in (ddp, twin):
                model.zero_grad()
                model(batch(1)).square().mean().backward()
            assert_identical(gradients(twin), gradients(ddp))
            assert twin.module[0].weight is not ddp.module[0].weight

        run_ranks(2, on_rank)

    def test_state_dict(self) -> None:
        def on_rank() -> None:
            ours, theirs = pair(mlp(4))
            assert list(ours.state_dict()) == list(theirs.state_dict())
            ours.load_state_dict(theirs.state_dict())

        run_ranks(2, on_rank)


class TestDeviceMesh:
    def test_one_dimension(self) -> None:
        def on_rank() -> None:
            mesh = init_device_mesh("cpu", (2,))
            ours, theirs = pair_on_mesh(mesh)
            train_both(ours, theirs)
            assert ours.device_mesh is mesh

        def pair_on_mesh(mesh: object) -> tuple[DDP, TorchDDP]:
            return DDP(mlp(4), device_mesh=mesh), TorchDDP(mlp(4), device_mesh=mesh)

        run_ranks(2, on_rank)

    def test_not_together_with_a_group(self) -> None:
        def on_rank() -> None:
            mesh = init_device_mesh("cpu", (2,))
            with pytest.raises(RuntimeError, match="process_group"):
                DDP(mlp(4), device_mesh=mesh, process_group=dist.group.WORLD)
            two = init_device_mesh("cpu", (1, 2))
            with pytest.raises(RuntimeError, match=r"1D|1-D|one dimension"):
                DDP(mlp(4), device_mesh=two)

        run_ranks(2, on_rank)
