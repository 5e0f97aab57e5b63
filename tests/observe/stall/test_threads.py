"""What a thread does, by its frames, where the records do not say it."""

from __future__ import annotations

import pytest
import torch

from paceline.observe.records import Activity
from paceline.observe.stall.threads import WORDS, look_at_threads


class Looking(torch.utils.data.Dataset[torch.Tensor]):
    """Says what the thread is taken to do that fetches a sample."""

    def __init__(self, activity: Activity) -> None:
        self.activity = activity
        self.where = ""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> torch.Tensor:
        self.where = look_at_threads(self.activity, []).where
        return torch.ones(1)


@pytest.mark.parametrize("activity", [Activity.STARTING, Activity.INPUT, Activity.LOSS])
def test_the_loader_after_a_forward_that_was_only_accumulated(activity: Activity) -> None:
    samples = Looking(activity)
    list(torch.utils.data.DataLoader(samples))
    assert samples.where == "waiting for the data loader"


def test_a_loader_inside_of_a_forward_is_the_forward() -> None:
    samples = Looking(Activity.FORWARD)
    list(torch.utils.data.DataLoader(samples))
    assert samples.where == WORDS[Activity.FORWARD]


def test_a_backward_that_is_not_synchronised() -> None:
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append(look_at_threads(Activity.LOSS, []).where))
    assert look_at_threads(Activity.LOSS, []).where == WORDS[Activity.LOSS]
    (2 * x).backward()
    assert seen == [WORDS[Activity.BACKWARD]]
