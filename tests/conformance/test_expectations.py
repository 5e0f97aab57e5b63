"""The tables are about tests that torch has, and hide none that torch's own class passes."""

from __future__ import annotations

from . import baseline
from .collect import collect
from .expectations import LEFT_OUT, MAY_PASS_WITH_TORCH, OVER_THE_GROUP, WAITS


def test_tables_name_only_tests_that_torch_has() -> None:
    assert set(LEFT_OUT) | WAITS | OVER_THE_GROUP <= set(collect())


def test_no_test_is_in_both_tables() -> None:
    assert not WAITS & set(LEFT_OUT)


def test_baseline_is_of_the_installed_torch_and_complete() -> None:
    record = baseline.load()
    found = baseline.minor_version(record.torch)
    assert found == baseline.minor_version(baseline.installed_torch())
    assert {*record.passed, *record.not_passed} == set(collect())


def test_what_passes_with_torch_is_not_left_out() -> None:
    hidden = {name for name, (reason, _) in LEFT_OUT.items() if reason is not MAY_PASS_WITH_TORCH}
    assert not hidden & set(baseline.load().passed)


def test_collecting_finds_tests_that_use_ddp_only_through_helpers() -> None:
    found = collect()
    assert "test_output_unused_in_loss_tuple_module" in found
    assert found["test_post_localSGD_optimizer_parity_with_hierarchical_sgd"].world_size == 4
    assert "test_get_rank" not in found
