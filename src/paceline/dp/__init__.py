"""Single-process data parallelism: replicas on accelerators, or on CPU threads."""

from paceline.dp.data_parallel import DataParallel, data_parallel
from paceline.dp.parallel_apply import parallel_apply
from paceline.dp.replicate import replicate
from paceline.dp.scatter_gather import gather, scatter, scatter_kwargs

__all__ = [
    "DataParallel",
    "data_parallel",
    "gather",
    "parallel_apply",
    "replicate",
    "scatter",
    "scatter_kwargs",
]
