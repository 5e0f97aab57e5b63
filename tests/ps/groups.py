"""Groups of tables and batches for them, without servers: for tests of plan and pool."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import strategies as st

from paceline import ps
from paceline.ps.client.batch import FlatBags, flat_bags
from paceline.ps.client.table_group import AttachedTable, Group, group_key_of

SHARDINGS = ("hash", "range", "table")


def make_group(configs: list[ps.TableConfig], servers: int, is_weighted: bool = False) -> Group:
    """A group of tables that were attached; with "table", each to one server in turn."""
    places = []
    for at, config in enumerate(configs):
        is_whole = config.sharding == "table"
        table_servers = [at % servers] if is_whole else range(servers)
        numbers = tuple(10 * at + s if s in table_servers else -1 for s in range(servers))
        places.append(AttachedTable(config, numbers))
    key = dataclasses.replace(group_key_of(0, configs[0], is_weighted, is_bags=True), alone=-1)
    return Group(range(len(configs)), places, key)


def flat(config: ps.TableConfig, ids: list[int], cuts: list[int], weights: bool) -> FlatBags:
    """A table's input; ``cuts`` are where bags end, in any order and place."""
    tensor = torch.tensor(ids, dtype=torch.int64)
    offsets = [0, *sorted(cut % (len(ids) + 1) for cut in cuts)]
    given = torch.rand(len(ids), dtype=config.dtype) if weights else None
    return flat_bags(config, ps.Bags(tensor, torch.tensor(offsets), given))


@st.composite
def batches(
    draw: st.DrawFn, configs: list[ps.TableConfig], *, most: int = 40, weights: bool = False
) -> list[FlatBags]:
    """Inputs for tables: of their own, or the same for neighbours, or for all."""
    sharing = draw(st.sampled_from(["all", "some", "none"]))
    inputs: list[FlatBags] = []
    fewest = min(config.num_embeddings for config in configs)
    for config in configs:
        is_same = sharing == "all" or (sharing == "some" and draw(st.booleans()))
        if inputs and is_same:
            inputs.append(inputs[-1])
            continue
        rows = config.num_embeddings if sharing == "none" else fewest
        ids = draw(st.lists(st.integers(0, rows - 1) | st.integers(0, 4), max_size=most))
        cuts = draw(st.lists(st.integers(0, most), max_size=5))
        inputs.append(flat(config, ids, cuts, weights))
    return inputs
