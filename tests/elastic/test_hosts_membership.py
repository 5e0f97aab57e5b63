"""Members on several hosts: hosts come, go and come back, in random orders of events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.elastic.members import ElasticPolicy, Kill
from paceline.elastic.membership import Membership
from tests.elastic.membership.simulated_job import Job
from tests.examples import examples


def make_job(hosts: int = 2, ranks: int = 2, **policy: object) -> Job:
    """Hosts that have all come, with so many ranks each."""
    found = ElasticPolicy(0, hosts=hosts, max_hosts=hosts, **policy)  # type: ignore[arg-type]
    job = Job(Membership(found))
    for host in range(hosts):
        assert not job.ranks
        job.do(job.membership.on_host(host, ranks))
    return job


def lose(job: Job, host: int, why: str = "cut") -> None:
    """A host is dropped, after its ranks have stopped."""
    for member in [m for m, rank in job.ranks.items() if rank.host == host]:
        del job.ranks[member]
    job.count_again()
    job.do(job.membership.on_host_lost(host, why))


def hosts_of(job: Job) -> list[int]:
    return sorted(job.ranks[member].host for member in job.training())


def test_ranks_are_numbered_host_by_host() -> None:
    job = make_job(2, 2)
    job.settle()
    order = sorted(job.training(), key=lambda m: job.ranks[m].place.rank)  # type: ignore[union-attr]
    assert [job.ranks[m].host for m in order] == [0, 0, 1, 1]


def test_a_lost_host_is_not_replaced_elsewhere_and_comes_back() -> None:
    job = make_job(2, 2)
    job.settle()
    job.step(7)
    lose(job, 1)
    job.settle()
    assert hosts_of(job) == [0, 0]
    job.do(job.membership.on_host(1, 2))
    job.settle()
    assert hosts_of(job) == [0, 0, 1, 1]


def test_a_step_makes_up_for_deaths_also_if_the_host_is_lost_after_it() -> None:
    job = make_job(2, 1, early_deaths=3)
    job.settle()
    for _ in range(4):
        job.die(next(m for m in job.training() if job.ranks[m].host == 1))
        job.settle()
        job.step(0)
        lose(job, 1)
        job.settle()
        job.do(job.membership.on_host(1, 1))
        job.settle()
        assert hosts_of(job) == [0, 1], job.failed


def test_a_dead_rank_is_replaced_on_its_host() -> None:
    job = make_job(3, 2)
    job.settle()
    job.die(next(m for m in job.training() if job.ranks[m].host == 1))
    job.settle()
    assert hosts_of(job) == [0, 0, 1, 1, 2, 2]


def test_scaled_down_a_lost_hosts_ranks_find_room_elsewhere() -> None:
    job = make_job(2, 2)
    job.settle()
    job.do(job.membership.on_scale(3))
    job.settle()
    assert hosts_of(job) == [0, 0, 1]
    job.do(job.membership.on_scale(2))
    job.settle()
    lose(job, 0)
    assert "nobody holds the state" in job.failed


def test_scaled_up_each_host_has_its_share() -> None:
    job = make_job(2, 2)
    job.settle()
    job.do(job.membership.on_scale(6))
    job.settle()
    assert hosts_of(job) == [0, 0, 0, 1, 1, 1]
    lose(job, 1)
    job.settle()
    assert hosts_of(job) == [0, 0, 0]


def test_a_host_that_is_told_to_end_hands_over_and_is_not_waited_for() -> None:
    job = make_job(2, 2, hold_s=1000.0)
    job.settle()
    job.step(7)
    job.do(job.membership.on_host_leaving(1))
    job.settle()
    assert hosts_of(job) == [0, 0]
    assert job.membership.now_s == 0.0
    assert len(job.released) == 2
    assert job.membership.policy.ranks == 2


def test_a_host_is_lost_before_the_first_epoch() -> None:
    job = make_job(2, 1)
    lose(job, 1)
    assert not job.ranks
    job.do(job.membership.on_host(1, 1))
    job.settle()
    assert hosts_of(job) == [0, 1]


def test_with_a_range_of_hosts_the_job_begins_without_those_that_are_late() -> None:
    job = Job(Membership(ElasticPolicy(0, hosts=1, max_hosts=3, gather_s=10.0)))
    job.do(job.membership.on_host(0, 2))
    assert not job.ranks
    assert job.membership.next_due_s() == 10.0
    job.do(job.membership.on_tick(10.0))
    job.settle()
    assert hosts_of(job) == [0, 0]
    job.do(job.membership.on_host(2, 1))
    job.settle()
    assert hosts_of(job) == [0, 0, 2]


NAMES = ("step", "die", "join", "leave", "catch_up", "tick", "lose", "back", "done")
EVENTS = st.lists(
    st.tuples(
        st.sampled_from([*NAMES, "cut_short", "die_in_step", "lose_link"]),
        st.integers(0, 7),
    ),
    max_size=60,
)


def happen(job: Job, what: str, number: int, ranks: int) -> None:
    host, members = number % 3, sorted(job.ranks)
    is_up = job.membership.hosts.is_up(host)
    if what == "step":
        job.step(number)
    elif what == "tick":
        job.do(job.membership.on_tick(job.membership.now_s + number))
    elif what == "lose" and is_up:
        lose(job, host)
    elif what == "back" and not is_up:
        job.do(job.membership.on_host(host, ranks))
    elif what == "cut_short" and is_up:  # a host, in the middle of a step
        job.cut_short()
        lose(job, host)
    elif what in ("die", "join", "leave", "catch_up", "die_in_step", "lose_link", "done"):
        getattr(job, what)(members[number % len(members)])


@settings(max_examples=examples(300))
@given(st.integers(1, 2), st.sampled_from([0.0, 5.0]), st.integers(0, 1), EVENTS)
def test_no_committed_step_is_lost(
    ranks: int, hold_s: float, spares: int, events: list[tuple[str, int]]
) -> None:
    job = make_job(3, ranks, hold_s=hold_s, early_deaths=1000, spares=spares)
    job.settle()
    assert job.membership.epoch == 0
    for what, number in events:
        if job.failed or job.membership.is_finished or not job.ranks:
            break
        happen(job, what, number, ranks)
        assert all(job.membership.hosts.is_up(rank.host) for rank in job.ranks.values())
    if not job.failed and not job.membership.is_finished:
        for host in range(3):
            if not job.membership.hosts.is_up(host):
                job.do(job.membership.on_host(host, ranks))
        job.settle()
    if job.failed:
        assert "nobody holds the state" in job.failed
    elif job.last_step is not None:
        job.finish()
    else:
        found = hosts_of(job)
        assert len(found) == 3 * ranks
        assert spares or found == sorted([0, 1, 2] * ranks)
        assert all(job.ranks[m].step == job.committed for m in job.training())


def test_kills_name_who_is_to_end_when_all_begin_again() -> None:
    job = make_job(2, 1)
    kills = [a for a in job.membership.on_host_lost(0, "cut") if isinstance(a, Kill)]
    assert [job.ranks[kill.member].host for kill in kills] == [1]
