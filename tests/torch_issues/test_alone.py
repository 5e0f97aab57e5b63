"""What torch's wrapper does where it hangs or dies, and ours (``docs/torch-issues.md``)."""

from __future__ import annotations

import re

import pytest

from paceline.testing import RanksFailedError, run_ranks
from tests.torch_issues import alone


class TestUnusedOnOneRank:
    """ultralytics 24675."""

    @pytest.mark.slow  # until the group's time-out
    def test_torch_waits_for_the_time_out(self) -> None:
        waits, raises = run_ranks(2, alone.unused_on_one_rank, "torch", timeout_s=120)
        assert re.search("DistBackendError|Timed out|RuntimeError", waits[-1])
        assert "parameter" not in waits[-1], "it would name the cause"
        assert raises[0] == "nothing", "the step that was wrong"
        assert "Expected to have finished reduction" in raises[1]
        assert "head" not in raises[1]

    def test_ours_names_it_on_every_rank(self) -> None:
        for said in run_ranks(2, alone.unused_on_one_rank, "paceline", timeout_s=120):
            assert len(said) == 1, "in the step that is wrong"
            assert said[0].startswith("UnusedParametersError")
            assert "rank 1: head.weight, head.bias" in said[0]


class TestFewerBatches:
    """33148, 38174; Lightning 20404."""

    @pytest.mark.slow  # until the group's time-out
    def test_torch_waits_for_the_time_out(self) -> None:
        waits, others = run_ranks(2, alone.fewer_batches, "torch", timeout_s=120)
        assert others == waits[:2] == ["nothing"] * 2
        assert re.search("DistBackendError|Timed out|RuntimeError", waits[2])
        assert "join" not in waits[2], "it would name the way out"

    def test_ours_names_both_calls_and_the_way_out(self) -> None:
        told, others = run_ranks(2, alone.fewer_batches, "paceline", timeout_s=120)
        assert others == told[:2] == ["nothing"] * 2
        assert told[2].startswith("CollectiveMismatchError")
        assert "in torch.distributed.all_reduce of group" in told[2]
        assert told[2].count("alone.py:") == 2
        assert "with ddp.join():" in told[2]


class TestBufferHookInJoin:
    """65436."""

    def test_torchs_ranks_meet_in_different_collectives(self) -> None:
        with pytest.raises(RanksFailedError) as caught:
            run_ranks(2, alone.buffer_hook_in_join, "torch", timeout_s=60)
        assert re.search("SIGABRT|RuntimeError|not done", str(caught.value))

    def test_ours_runs_it_on_joined_ranks(self) -> None:
        first, second = run_ranks(2, alone.buffer_hook_in_join, "paceline", timeout_s=60)
        assert first == second
        counted = [0, 0]
        for step in range(4):  # the number of batches, which the hook sums up, too
            counted = [sum(counted) + (1 if step > 1 else 2)] * 2
        assert first[2] == [counted[0]]


class TestGraphsAndBuckets:
    """108966."""

    @pytest.mark.slow
    def test_torchs_graphs_follow_the_buckets(self) -> None:
        for small, *counts in run_ranks(2, alone.graphs_of_bucket_sizes, "torch", timeout_s=200):
            assert str(small).startswith("AssertionError: First bucket")
            assert counts == sorted(set(counts), reverse=True), "smaller buckets, more graphs"

    def test_ours_do_not(self) -> None:
        for counts in run_ranks(2, alone.graphs_of_bucket_sizes, "paceline", timeout_s=200):
            assert len(set(counts)) == 1, counts
            assert isinstance(counts[0], int)

    @pytest.mark.slow
    def test_ours_can_be_set(self) -> None:
        for counts in run_ranks(2, alone.graphs_of_graph_sizes, timeout_s=200):
            assert counts == sorted(set(counts), reverse=True)
