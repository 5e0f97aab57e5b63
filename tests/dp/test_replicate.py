"""Replicas share memory where they can, copy what they write, and are whole modules."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import paceline
from paceline.dp.devices import CPU, accelerator_type, parse_device, torch_id
from tests.dp.compare import CPUS


def test_parameters_are_not_copied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv2d(2, 2, 3))
    for replica in paceline.replicate(model, ["cpu"] * 3):
        for original, copied in zip(model, replica, strict=True):
            for name, parameter in original.named_parameters():
                alias = getattr(copied, name)
                assert alias.data_ptr() == parameter.data_ptr()
                assert alias.stride() == parameter.stride()
                assert not alias.is_leaf
                assert not isinstance(alias, nn.Parameter)
                assert copied._former_parameters[name] is alias


def test_detached_replicas_share_memory_and_send_no_gradient() -> None:
    layer = nn.Linear(3, 3)
    layer.register_buffer("scale", torch.ones(3, requires_grad=True))
    for replica in paceline.replicate(layer, CPUS, detach=True):
        assert replica.weight.data_ptr() == layer.weight.data_ptr()
        assert not replica.weight.requires_grad
        assert not replica.scale.requires_grad
    assert layer.scale.requires_grad


def test_what_is_shared_in_the_module_is_shared_in_the_replica() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    block = nn.Linear(4, 4)
    model = nn.ModuleList([tied, block, nn.Sequential(block)])
    for replica in paceline.replicate(model, CPUS):
        assert replica[0][0].weight is replica[0][1].weight
        assert replica[1] is replica[2][0]
        assert replica[1] is not block


def test_absent_parameters_buffers_and_children_stay_none() -> None:
    model = nn.Linear(2, 2, bias=False)
    model.register_buffer("none", None)
    model.register_module("child", None)
    (replica, _) = paceline.replicate(model, CPUS)
    assert replica.bias is None
    assert replica.none is None
    assert replica.child is None


def test_replicas_are_marked_and_zero_grad_warns() -> None:
    (replica, _) = paceline.replicate(nn.Linear(2, 2), CPUS)
    assert replica._is_replica
    with pytest.warns(UserWarning, match="has no effect"):
        replica.zero_grad()


def test_no_device_no_replica() -> None:
    assert paceline.replicate(nn.Linear(2, 2), []) == []


def test_another_device_gets_one_copy_and_each_replica_an_alias() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    first, second, third = paceline.replicate(model, ["cpu", "meta", "meta"])
    assert first[0].weight.device.type == "cpu"
    assert second[0].weight.device.type == third[0].weight.device.type == "meta"
    assert second[0].weight._base is third[0].weight._base
    assert second[1].running_mean is not third[1].running_mean
    assert second[1].running_mean.device.type == "meta"
    names = {second[0].weight.grad_fn.next_functions[0][0].name()}
    assert names == {"ToCopyBackward0"}


def test_a_replica_dies_at_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    gc.collect()
    gc.disable()
    try:
        replicas = paceline.replicate(model, CPUS)
        watch = [weakref.ref(m) for replica in replicas for m in replica.modules()]
        del replicas
        assert not any(ref() for ref in watch)
    finally:
        gc.enable()


class OwnSetattr(nn.Module):
    """Like an RNN: a list of weights that follows the attributes."""

    def __init__(self) -> None:
        self.__dict__["seen"] = {}
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight":
            self.seen[name] = value

    def _replicate_for_data_parallel(self) -> OwnSetattr:
        replica = super()._replicate_for_data_parallel()
        replica.__dict__["seen"] = {}
        return replica


def test_modules_may_have_their_own_way_of_copying_and_setting() -> None:
    model = OwnSetattr()
    for replica in paceline.replicate(model, CPUS):
        assert replica.seen["weight"] is replica.weight
    assert model.seen["weight"] is model.weight


def test_weights_of_a_parametrized_module_come_from_the_replica() -> None:
    model = parametrizations.weight_norm(nn.Linear(3, 3))
    for replica in paceline.replicate(model, CPUS):
        originals = replica.parametrizations.weight
        assert originals.original0.data_ptr() == model.parametrizations.weight.original0.data_ptr()
        torch.testing.assert_close(replica.weight, model.weight)


def test_a_script_module_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)  # which it is since torch 2.15
        script = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="children of ScriptModule: inner"):
        paceline.replicate(nn.ModuleDict({"inner": script}), CPUS)


def test_devices() -> None:
    assert parse_device("cpu:0") == parse_device(torch.device("cpu", 0)) == CPU
    assert parse_device("meta") == torch.device("meta")
    assert torch_id(CPU) == CPU
    if accelerator_type() is None:
        with pytest.raises(RuntimeError, match=r'this machine has none.*\["cpu", "cpu"\]'):
            parse_device(1)
        with pytest.raises(paceline.errors.PlacementError):
            paceline.scatter(torch.zeros(2), [0, 1])
