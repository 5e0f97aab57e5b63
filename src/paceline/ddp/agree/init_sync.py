"""Construction: verify that all ranks hold the same model, then make them start equal.

Called by the wrapper, and by :mod:`paceline.ddp.agree.peers`, also when buckets are cut anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from paceline.buckets import BucketCaps, BucketPlan, ParameterSpec
from paceline.config import ReducePolicy
from paceline.errors import ModelMismatchError
from paceline.transport.exchange import gather_digests, gather_json
from paceline.transport.messages import broadcast_tensors
from paceline.types import Messages

BROADCAST_CHUNK_BYTES = 250 * 1024 * 1024


def verify_same_model(
    messages: Messages,
    specs: Sequence[ParameterSpec],
    policy: ReducePolicy,
    caps: BucketCaps,
    device: torch.device,
) -> None:
    """Check that every rank has the same parameters and the same settings.

    One small collective if they do. Otherwise the descriptions are exchanged, and every rank says
    what differs first, between which ranks.

    Raises:
        ModelMismatchError: On every rank.
    """
    what = "comparison of models"
    manifest = _manifest(specs, policy, caps)
    digest = hashlib.sha256(json.dumps(manifest).encode()).digest()
    if len(set(gather_digests(messages, what, digest, device))) == 1:
        return
    manifests = gather_json(messages, what, manifest, device)
    for rank, other in enumerate(manifests):
        if other != manifests[0]:
            raise _mismatch(manifests[0], other, rank)


def verify_same_plan(messages: Messages, plan: BucketPlan, device: torch.device) -> None:
    """Check that every rank cuts its gradients into the same buckets.

    Raises:
        ModelMismatchError: On every rank, with the first bucket that differs.
    """
    what = "comparison of buckets"
    if len(set(gather_digests(messages, what, bytes.fromhex(plan.digest), device))) == 1:
        return
    plans: list[list[str]] = gather_json(messages, what, plan.describe(), device)
    for rank, other in enumerate(plans):
        for mine, theirs in zip(plans[0], other, strict=False):
            if mine != theirs:
                raise ModelMismatchError(
                    f"Ranks cut their gradients into different buckets.\n  rank 0: {mine}\n"
                    f"  rank {rank}: {theirs}\nGive every rank the same model and the same bucket "
                    "arguments, and do not convert or freeze (requires_grad=False) parameters on "
                    "some ranks only.",
                    rank=rank,
                )
    if len({len(lines) for lines in plans}) == 1:
        raise ModelMismatchError(
            "Parameters lie in memory in different ways on different ranks (their strides differ, "
            "for example by memory_format=torch.channels_last), so gradients cannot be summed. "
            "Give every rank the same model."
        )
    raise ModelMismatchError(
        f"Ranks cut their gradients into different numbers of buckets: {[len(p) for p in plans]}. "
        "Give every rank the same model and the same bucket arguments."
    )


def broadcast_module(
    module: torch.nn.Module,
    messages: Messages,
    *,
    source: int,
    ignored: set[str],
    with_buffers: bool,
) -> None:
    """Copy parameters, and buffers if asked for, from one rank to all."""
    states: list[tuple[str, torch.Tensor]] = list(module.named_parameters())
    if with_buffers:
        states += module.named_buffers()
    tensors = [tensor.detach() for name, tensor in states if name not in ignored]
    broadcast_tensors(messages, "broadcast of the model", tensors, BROADCAST_CHUNK_BYTES, source)


def _manifest(
    specs: Sequence[ParameterSpec], policy: ReducePolicy, caps: BucketCaps
) -> dict[str, Any]:
    return {
        "parameters": [
            [spec.name, list(spec.shape), str(spec.dtype), list(spec.stride), spec.sparse]
            for spec in specs
        ],
        "settings": {
            "bucket sizes in bytes": [caps.first_cap_bytes, caps.cap_bytes, *caps.listed],
            "find_unused_parameters": policy.find_unused,
            "static_graph": policy.static_graph,
            "skip_all_reduce_unused_params": policy.skip_unused,
            "nonfinite": policy.nonfinite.value,
            "missing_gradients": policy.missing.value,
            "check_every": policy.check_every,
            "shards": None if policy.shards is None else dataclasses.asdict(policy.shards),
        },
    }


_FIELDS = ("name", "shape", "dtype", "strides", "sparse gradient")


def _other_names(left: list[str], right: list[str], rank: int) -> ModelMismatchError:
    """Say which parameters require gradients on one of two ranks only."""
    only = {0: [name for name in left if name not in right]}
    only[rank] = [name for name in right if name not in left]
    told = " ".join(f"Only rank {r} has {', '.join(names)}." for r, names in only.items() if names)
    return ModelMismatchError(
        f"DDP expects same model across all ranks, but Rank 0 has {len(left)} params, while rank "
        f"{rank} has inconsistent {len(right)} params that require gradients. {told} Build the "
        "same model on every rank before it is wrapped, and set requires_grad alike: a parameter "
        "that is frozen (requires_grad=False) on one rank only is missing there.",
        rank=rank,
        parameters=tuple(only[0] or only[rank]),
    )


def _mismatch(reference: dict[str, Any], other: dict[str, Any], rank: int) -> ModelMismatchError:
    left_names = [entry[0] for entry in reference["parameters"]]
    right_names = [entry[0] for entry in other["parameters"]]
    if set(left_names) != set(right_names):
        return _other_names(left_names, right_names, rank)
    for index, (expected, found) in enumerate(
        zip(reference["parameters"], other["parameters"], strict=False)
    ):
        for field, left, right in zip(_FIELDS, expected, found, strict=True):
            if left != right:
                return ModelMismatchError(
                    f"The model differs between ranks: params[{index}] is {expected[0]!r} with "
                    f"{field} {left} on rank 0, and {found[0]!r} with {field} {right} on rank "
                    f"{rank}: it appears not to match sizes of the same param in process 0 "
                    f"(shapes {expected[1]} and {found[1]}). Build the same model on every rank "
                    "before it is wrapped.",
                    rank=rank,
                    parameters=(expected[0],),
                )
    for key, value in reference["settings"].items():
        if other["settings"][key] != value:
            return ModelMismatchError(
                f"DistributedDataParallel was constructed differently: {key} is {value} on rank 0 "
                f"and {other['settings'][key]} on rank {rank}. Pass the same arguments on every "
                f"rank.",
                rank=rank,
            )
    raise AssertionError("manifests differ but no difference was found")
