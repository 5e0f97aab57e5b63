from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import IdRangeError
from paceline.ps.client.row_plan import Layout
from paceline.ps.protocol.sharding import owners
from paceline.ps.protocol.table_spec import Sharding
from tests.examples import examples

ROWS = (7, 1000, 1 << 39)
ids_of = [st.lists(st.integers(0, rows - 1) | st.integers(0, 6), max_size=30) for rows in ROWS]


def layout(sharding: Sharding, servers: int, tables: int = 3) -> Layout:
    table_servers = [at % servers for at in range(tables)]
    names = [f"t{at}" for at in range(tables)]
    return Layout(names, ROWS[:tables], sharding, servers, table_servers)


@settings(max_examples=examples(150))
@given(st.sampled_from(list(Sharding)), st.integers(1, 5), st.tuples(*ids_of), st.integers(1, 3))
def test_each_id_once_on_its_server_and_found_again(
    sharding: Sharding, servers: int, lists: tuple[list[int], ...], tables: int
) -> None:
    ids = [np.array(each, np.int64) for each in lists[:tables]]
    found = layout(sharding, servers, tables).find(ids)
    at = 0
    for table, mine in enumerate(ids):
        places = found.inverse[at : at + len(mine)]
        at += len(mine)
        assert (found.ids[places] == mine).all()
        ordered = found.places(table)
        assert found.ids[ordered].tolist() == sorted(set(mine.tolist()))
        counts = np.unique(mine, return_counts=True)[1]
        assert found.has_pairs[table] == (counts >= 2).any()
        assert found.has_triples[table] == (counts >= 3).any()
        for server in range(servers):
            low = found.starts[server * tables + table]
            high = found.starts[server * tables + table + 1]
            here = found.ids[low:high]
            owner = owners(sharding, ROWS[table], servers, here)
            if sharding is Sharding.TABLE:
                owner[:] = table % servers
            assert (owner == server).all()
            assert high - low == found.counts(server)[table]
    assert len(found.ids) == sum(len(set(each)) for each in lists[:tables])
    assert found.starts[-1] == len(found.ids)


@pytest.mark.parametrize("wrong", [7, -1, 1 << 62, -(1 << 62)])
def test_an_id_out_of_range_is_named_with_its_table(wrong: int) -> None:
    ids = [np.array([0, 6]), np.array([999]), np.array([5])]
    ids[0] = np.array([6, wrong, 0])
    with pytest.raises(
        IdRangeError, match=rf"table 't0' takes value {wrong} which.* \[0, 7\)"
    ) as caught:
        layout(Sharding.HASH, 2).find(ids)
    assert (caught.value.table, caught.value.id) == ("t0", wrong)


def test_padding_is_found_only_if_the_batch_has_it() -> None:
    plan = layout(Sharding.RANGE, 2, 1)
    found = plan.find([np.array([5, 1, 5, 6])])
    places = [found.place(id, 0, plan.owner_of(0, id)) for id in range(7)]
    assert places == [None, 0, None, None, None, 1, 2]
