"""Tools to test distributed code with real processes, for our own tests and for users'.

>>> import torch, torch.distributed as dist
>>> from paceline.testing import run_ranks
>>> def total():
...     value = torch.tensor(dist.get_rank() + 1)
...     dist.all_reduce(value)
...     return value.item()
>>> run_ranks(2, total)
[3, 3]
"""

from paceline.launch.child import ForkServerError
from paceline.testing.failures import RankFailure, RanksFailedError
from paceline.testing.ranks import run_ranks, warm_up

__all__ = ["ForkServerError", "RankFailure", "RanksFailedError", "run_ranks", "warm_up"]
