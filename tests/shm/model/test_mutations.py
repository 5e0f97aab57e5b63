"""The model can fail: every rule of the protocol, broken, is found by the search.

A rule that can be broken without harm would be a rule that the code does not need; one is, and the
test says so.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.shm.model.machine import Happenings, ViolationError
from tests.shm.model.programs import Rules
from tests.shm.model.search import explore

RIGHT = Rules()
QUIET = Happenings()
ONE_DIES = Happenings(deaths=1)
pytestmark = pytest.mark.timeout(60)


def broken(
    script: str, world: int, happenings: Happenings, message: str, **changes: object
) -> None:
    """See that the script is right by the rules, and that the changed rules are caught."""
    explore(script, world, happenings)
    with pytest.raises(ViolationError, match=message):
        explore(script, world, happenings, replace(RIGHT, **changes))


class TestMemory:
    def test_three_slots_are_too_few(self) -> None:
        """The results of a phase are taken after the next but one was announced."""
        broken("staged staged", 2, QUIET, "takes", slots=3)

    def test_two_slots_are_too_few_for_rounds(self) -> None:
        broken("rounds rounds", 2, QUIET, "takes", slots=2)

    def test_one_ticket_is_overwritten_while_it_is_compared(self) -> None:
        broken("tiny tiny", 2, QUIET, "'ticket'.* takes|takes .*'ticket'", tickets=1)

    def test_arriving_before_putting(self) -> None:
        broken("tiny", 2, QUIET, "takes", puts_before_arriving=False)

    def test_taking_results_before_their_phase(self) -> None:
        broken("staged", 2, QUIET, "'result'", takes_one_phase_later=False)

    def test_in_place_without_a_meeting_before(self) -> None:
        broken("place", 2, QUIET, "'copy'", enters_in_place=False)

    def test_in_place_without_a_meeting_after(self) -> None:
        broken("place", 2, QUIET, "'copy'", leaves_in_place=False)

    def test_in_place_without_a_look_at_the_verdict_after(self) -> None:
        """A late rank would take what its peer wrote after giving up for a result."""
        late = Happenings(deadlines=True, reuse=True)
        broken("place", 2, late, "'copy'", looks_at_the_verdict_on_leaving=False)

    def test_a_torn_copy_of_a_dead_rank_without_a_meeting_after(self) -> None:
        broken("place", 3, ONE_DIES, "'copy'", leaves_in_place=False)


class TestWaking:
    def test_a_waker_that_never_wakes(self) -> None:
        broken("tiny", 2, QUIET, "lost wake-up", wakes=False)

    def test_a_waker_that_looks_for_sleepers_before_it_counts(self) -> None:
        """Also what a processor would do if the two were not sequentially consistent."""
        broken("tiny", 2, QUIET, "lost wake-up", counts_before_looking=False)

    def test_a_kernel_that_does_not_compare(self) -> None:
        broken("tiny", 2, QUIET, "lost wake-up", kernel_compares=False)

    def test_a_sleeper_that_looks_before_it_announces_itself(self) -> None:
        """Harmless as long as the kernel compares; without that, it is not."""
        late = replace(RIGHT, announces_before_looking=False)
        for world in (2, 3):
            explore("tiny", world, QUIET, late)
        with pytest.raises(ViolationError, match="lost wake-up"):
            explore("tiny", 2, QUIET, replace(late, kernel_compares=False))

    def test_a_count_that_is_reset(self) -> None:
        """A slow rank does not see the full count any more and sleeps."""
        broken("tiny tiny", 2, QUIET, "lost wake-up|waits for ever", resets_the_count=True)

    def test_a_sleep_without_end_when_the_waker_dies(self) -> None:
        broken("tiny", 2, ONE_DIES, "waits for ever", sleeps_with_timer=False)


class TestEnds:
    def test_nobody_watches(self) -> None:
        broken("tiny tiny", 2, ONE_DIES, "waits for ever", watches=False)

    def test_a_watch_that_does_not_look_at_the_count_again(self) -> None:
        """A rank that has left after its last collective would be taken for lost."""
        broken("tiny", 2, QUIET, "failed|nobody died", looks_again_after_watching=False)

    def test_a_watch_that_wants_a_late_rank(self) -> None:
        """A survivor would wait for a slow third rank, though the second is dead."""
        broken("tiny tiny", 3, ONE_DIES, "though .* is gone", any_gone_rank_is_lost=False)

    def test_waiters_that_do_not_look_at_the_verdict(self) -> None:
        aborted = Happenings(aborts=True)
        broken("tiny tiny", 2, aborted, "waits for ever", waiters_see_verdicts=False)

    def test_a_row_that_is_noted_before_the_count(self) -> None:
        """A waiter at its deadline would find that nobody is missing, and blame itself."""
        late = Happenings(deadlines=True)
        broken("tiny", 2, late, "nobody is missing", counts_before_noting=False)
