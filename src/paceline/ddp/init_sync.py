"""Construction: verify that all ranks hold the same model, then make them start equal.

Called by the wrapper before the reducer exists, and by the reducer's owner when buckets are cut
anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline.buckets import BucketCaps, BucketPlan, ParameterSpec
from paceline.config import ReducePolicy
from paceline.errors import ModelMismatchError
from paceline.torch_private import sync_module
from paceline.transport.exchange import gather_digests, gather_json

BROADCAST_CHUNK_BYTES = 250 * 1024 * 1024


def verify_same_model(
    group: dist.ProcessGroup,
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
    manifest = _manifest(specs, policy, caps)
    digest = hashlib.sha256(json.dumps(manifest).encode()).digest()
    if len(set(gather_digests(group, digest, device))) == 1:
        return
    manifests = gather_json(group, manifest, device)
    for rank, other in enumerate(manifests):
        if other != manifests[0]:
            raise _mismatch(manifests[0], other, rank)


def verify_same_plan(group: dist.ProcessGroup, plan: BucketPlan, device: torch.device) -> None:
    """Check that every rank cuts its gradients into the same buckets.

    Raises:
        ModelMismatchError: On every rank, with the first bucket that differs.
    """
    if len(set(gather_digests(group, bytes.fromhex(plan.digest), device))) == 1:
        return
    plans: list[list[str]] = gather_json(group, plan.describe(), device)
    for rank, other in enumerate(plans):
        for mine, theirs in zip(plans[0], other, strict=False):
            if mine != theirs:
                raise ModelMismatchError(
                    f"Ranks cut their gradients into different buckets.\n  rank 0: {mine}\n"
                    f"  rank {rank}: {theirs}\nGive every rank the same model and the same bucket "
                    "arguments, and do not convert or freeze parameters on some ranks only.",
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
    group: dist.ProcessGroup,
    *,
    source: int,
    ignored: set[str],
    with_buffers: bool,
) -> None:
    """Copy parameters, and buffers if asked for, from one rank to all."""
    sync_module(
        module,
        group,
        BROADCAST_CHUNK_BYTES,
        source=source,
        ignored=ignored,
        with_buffers=with_buffers,
    )


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
        },
    }


_FIELDS = ("name", "shape", "dtype", "strides", "sparse gradient")


def _mismatch(reference: dict[str, Any], other: dict[str, Any], rank: int) -> ModelMismatchError:
    for index, (expected, found) in enumerate(
        zip(reference["parameters"], other["parameters"], strict=False)
    ):
        for field, left, right in zip(_FIELDS, expected, found, strict=True):
            if left != right:
                return ModelMismatchError(
                    f"The model differs between ranks: parameter {index} is {expected[0]!r} with "
                    f"{field} {left} on rank 0, and {found[0]!r} with {field} {right} on rank "
                    f"{rank} (shapes {expected[1]} and {found[1]}). Build the same model on every "
                    "rank before it is wrapped.",
                    rank=rank,
                    parameters=(expected[0],),
                )
    left_names = [entry[0] for entry in reference["parameters"]]
    right_names = [entry[0] for entry in other["parameters"]]
    if len(left_names) != len(right_names):
        longer, extra_rank = (
            (left_names, 0) if len(left_names) > len(right_names) else (right_names, rank)
        )
        extra = longer[min(len(left_names), len(right_names)) :]
        return ModelMismatchError(
            f"The model differs between ranks: rank 0 has {len(left_names)} parameters that "
            f"require gradients, rank {rank} has {len(right_names)}. Only rank {extra_rank} has "
            f"{', '.join(extra)}. Build the same model on every rank before it is wrapped.",
            rank=rank,
            parameters=tuple(extra),
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
