"""Ray Train with replica groups: ``torch_config=ElasticTorchConfig()``.

As Ray's ``TorchftConfig``: each worker is a replica, and Ray replaces only those that are gone. The
others keep their processes, and :func:`paceline.elastic.run` in the training function lets them go
on. Who trains is decided in Ray's controller: :mod:`paceline.integrations.ray_job`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.torch.config import _set_torch_distributed_env_vars, _setup_torch_process_group
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.worker_group import ReplicaGroup

from paceline.config import BACKEND_NAME
from paceline.elastic.members import ElasticPolicy
from paceline.errors import ConfigurationError, MembershipError
from paceline.integrations.ray import AUTO, TorchConfig, TorchSetup, has_accelerator
from paceline.integrations.ray_job import Place, RayJob

__all__ = ["ElasticTorchConfig"]


@dataclass
class ElasticTorchConfig(TorchConfig):
    """Workers outlive each other: the training function calls a function under ``elastic.run``.

    All workers are on the node of Ray's controller, and on its CPUs. How often Ray replaces a
    worker says ``FailureConfig(max_failures=...)``.

    Args:
        minimum: Fewer workers than this do not train; they wait for a replacement.
        hold_s: How long to wait for a replacement before the others go on without it.

    Example::

        TorchTrainer(
            train,
            torch_config=ElasticTorchConfig(),
            scaling_config=ScalingConfig(num_workers=4),
            run_config=RunConfig(failure_config=FailureConfig(max_failures=10)),
        )
    """

    minimum: int = 1
    hold_s: float = 0.0

    @property
    def backend_cls(self) -> type:
        """What sets up the workers."""
        return _ElasticSetup


class _ElasticSetup(TorchSetup):
    """Hands each worker its place in the job, instead of one group for all time."""

    has_replica_groups = True

    def __init__(self) -> None:
        super().__init__()
        self._job: RayJob | None = None

    def on_start(self, worker_group: Any, backend_config: ElasticTorchConfig) -> None:
        """Workers are there: all of them, or the replacement of one."""
        workers = worker_group.get_workers()
        check_place(workers, worker_group.get_resources_per_worker())
        if not isinstance(worker_group, ReplicaGroup):
            self._begin(len(workers), backend_config)
        assert self._job is not None
        backend = BACKEND_NAME if backend_config.backend == AUTO else backend_config.backend
        try:
            places = [
                self._job.take(worker.distributed_context.world_rank, worker.metadata.pid)
                for worker in workers
            ]
        except MembershipError as error:
            raise WorkerGroupStartupFailedError(str(error)) from error
        worker_group.execute(_set_torch_distributed_env_vars)
        ray.get(
            [
                worker.execute_async(enter, place, backend, backend_config.timeout_s)
                for worker, place in zip(workers, places, strict=True)
            ]
        )

    def _begin(self, ranks: int, config: ElasticTorchConfig) -> None:
        if not 1 <= config.minimum <= ranks:
            raise ConfigurationError(
                f"minimum={config.minimum} of {ranks} workers: it must be between 1 and {ranks}"
            )
        self._end()
        self._job = RayJob(ElasticPolicy(ranks, config.minimum, hold_s=config.hold_s))

    def _end(self) -> None:
        if self._job is not None:
            self._job.close()
            self._job = None

    def on_shutdown(self, worker_group: Any, backend_config: ElasticTorchConfig) -> None:
        """Workers are about to end. One that is replaced may be dead already."""
        if not isinstance(worker_group, ReplicaGroup):
            self._end()
            super().on_shutdown(worker_group, backend_config)


def check_place(workers: list[Any], resources: dict[str, float]) -> None:
    """Refuse workers that cannot be watched from here."""
    if has_accelerator(resources):
        raise ConfigurationError(
            "ElasticTorchConfig is for workers on CPUs (use_gpu=False); "
            "TorchConfig starts all workers again when one dies"
        )
    here = ray.get_runtime_context().get_node_id()
    away = [w.distributed_context.world_rank for w in workers if w.metadata.node_id != here]
    if away:
        raise ConfigurationError(
            f"workers {away} are on other nodes than Ray's controller; with ElasticTorchConfig all "
            "are on one. `paceline run --elastic` trains on several hosts"
        )


def enter(place: Place, backend: str, timeout_s: int) -> None:
    """In a worker: take its place, alone until it comes to ``train(state)``."""
    os.environ |= place.environ
    _setup_torch_process_group(backend, 0, 1, f"file://{place.meeting}", timeout_s)
