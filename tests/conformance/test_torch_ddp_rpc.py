"""torch's own tests of DDP under distributed autograd, each as one pytest test.

All of them must pass with either class. How many wrappers the ranks made, and of which class, is
compared too: a swap that did not reach torch's file would otherwise let torch test itself.
"""

from __future__ import annotations

import pytest

from .client import DEADLINE_S, Client
from .collect import TorchTest, collect_rpc
from .outcome import PASSED

# The server ends a test by itself: this is only for a server that hangs.
pytestmark = pytest.mark.timeout(2 * DEADLINE_S)

CLASSES = {
    "torch": "torch.nn.parallel.distributed.DistributedDataParallel",
    "paceline": "paceline.ddp.wrapper.DistributedDataParallel",
}
# How many wrappers the four trainers make together.
WRAPPERS = {
    "test_backward_no_ddp": 0,
    "test_backward_ddp_outside": 4,
    "test_backward_ddp_outside_uneven_inputs": 4,
    "test_backward_ddp_inside": 4,
    "test_ddp_comparison": 4,
    "test_ddp_comparison_uneven_inputs": 4,
    "test_ddp_dist_autograd_sparse_grads": 4,
    "test_ddp_dist_autograd_local_vs_remote": 8,
}


def test_these_are_all_that_torch_has() -> None:
    assert set(collect_rpc()) == set(WRAPPERS)


@pytest.mark.parametrize("test", collect_rpc().values(), ids=lambda test: test.name)
def test_torch_ddp_rpc(client: Client, test: TorchTest) -> None:
    outcome = client.run(test)
    if outcome.status != PASSED:
        pytest.fail(f"{test.name} {outcome.status}\n{outcome.detail}", pytrace=False)
    assert outcome.wrappers == [CLASSES[client.choice]] * WRAPPERS[test.name]
