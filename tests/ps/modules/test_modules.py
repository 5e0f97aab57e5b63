"""``ps.Embedding`` and ``ps.EmbeddingBag``: what they refuse, send, keep and push."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from paceline import ps
from paceline.errors import BagsError, ConfigurationError, IdRangeError, NotPicklableError
from tests.ps.modules.tables import DIM, LR, ROWS, gradient_like, names

pytestmark = pytest.mark.usefixtures("every_byte_counts")


def make(servers: ps.Servers, **options: object) -> ps.EmbeddingBag:
    given: dict[str, object] = {"name": next(names), "mode": "sum", "optimizer": ps.SGD(LR)}
    return ps.EmbeddingBag(ROWS, DIM, servers=servers, **(given | options))  # type: ignore[arg-type]


LINE = torch.tensor([1, 2, 3])
ZERO = torch.tensor([0])


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((torch.tensor([[1, ROWS]]),), IndexError, f"value {ROWS} which is not"),
        ((torch.tensor([[1, -1]]),), RuntimeError, "value -1 which is not"),
        ((LINE,), ValueError, "it says where bags begin"),
        ((LINE[None], ZERO), ValueError, "2D"),
        ((LINE[None, None],), ValueError, "dimension 3"),
        ((LINE, ZERO[None]), ValueError, "1D Tensor, not 2D"),
        ((LINE.float(), ZERO), RuntimeError, "but got torch.FloatTensor"),
        ((LINE, torch.tensor([1])), RuntimeError, "However, got 1"),
        ((LINE, torch.tensor([0, 4])), RuntimeError, "of 4"),
        ((LINE, torch.tensor([0, 2, 1])), RuntimeError, "offsets grow"),
        ((LINE, ZERO, torch.ones(2)), ValueError, "the same shape"),
        ((LINE, ZERO, torch.ones(3, dtype=torch.float64)), RuntimeError, "weights torch.float64"),
    ],
)
def test_wrong_input_is_refused_as_by_torch(
    servers: ps.Servers, arguments: tuple[Tensor, ...], kind: type[Exception], text: str
) -> None:
    module = make(servers)
    with pytest.raises((BagsError, IdRangeError), match=text) as caught:
        module(*arguments)
    assert isinstance(caught.value, kind)
    assert module.config.name in str(caught.value)
    assert module(LINE, ZERO).shape == (1, DIM)  # it goes on


def test_weights_without_sum_are_not_implemented(servers: ps.Servers) -> None:
    with pytest.raises(NotImplementedError, match="mode='sum'"):
        make(servers, mode="mean")(LINE, ZERO, torch.ones(3))


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "median"},
        {"sharding": "row"},
        {"pooling": "nobody"},
        {"pooling": "server"},
        {"pooling": "server", "sharding": "table", "mode": "max"},
        {"dtype": torch.int64},
        {"padding_idx": ROWS},
        {"staleness": -1},
    ],
)
def test_wrong_options_are_refused(servers: ps.Servers, options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        make(servers, **options)


def test_another_table_of_the_same_name_is_refused(servers: ps.Servers) -> None:
    module = make(servers)
    with pytest.raises(RuntimeError, match="another name"):
        ps.EmbeddingBag(ROWS + 1, DIM, servers=servers, name=module.config.name)
    same = make(servers, name=module.config.name, optimizer=ps.SGD(0.1))  # lr is not part of it
    assert torch.equal(same.rows(LINE), module.rows(LINE))


def test_server_pooling_moves_fewer_bytes_and_the_same_bits(servers: ps.Servers) -> None:
    rows, dim = 40, 32
    ids = torch.arange(rows).repeat(2, 1)
    sent = {}
    for pooling in ("trainer", "server", "auto"):
        module = ps.EmbeddingBag(
            rows,
            dim,
            mode="sum",
            servers=servers,
            name=next(names),
            sharding="table",
            pooling=pooling,
        )
        module.write(torch.arange(rows), torch.arange(rows * dim).view(rows, dim) / 7)
        before = traffic(servers)
        output = module(ids, None, torch.full(ids.shape, 0.3))
        output.backward(gradient_like(output))
        servers.flush()
        sent[pooling] = traffic(servers) - before, output.detach(), module.rows(ids)
    assert sent["server"][0] < sent["trainer"][0]
    assert sent["auto"][0] == sent["server"][0]
    for pooling in ("server", "auto"):
        assert torch.equal(sent[pooling][1], sent["trainer"][1])
        assert torch.equal(sent[pooling][2], sent["trainer"][2])


@pytest.mark.parametrize(("bag", "side"), [(40, "trainer"), (2000, "server")])
def test_servers_pool_where_it_is_worth_it(
    bag: int, side: str, servers: ps.Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    sent = {}
    for pooling in (side, "auto"):
        module = ps.EmbeddingBag(
            bag,
            32,
            mode="sum",
            servers=servers,
            name=next(names),
            sharding="table",
            pooling=pooling,
        )
        before = traffic(servers)
        module(torch.arange(bag).view(1, -1))
        sent[pooling] = traffic(servers) - before
    assert sent["auto"] == sent[side]


def traffic(servers: ps.Servers) -> int:
    return sum(each.sent_bytes + each.received_bytes for each in servers.channels)


def test_bytes_grow_with_unique_ids_and_not_with_the_table(servers: ps.Servers) -> None:
    moved = {}
    for rows in (1000, 1 << 30):
        module = ps.EmbeddingBag(rows, 64, servers=servers, name=next(names), pooling="trainer")
        for unique in (10, 100):
            ids = (torch.arange(1000) % unique).view(10, 100)
            before = traffic(servers)
            module(ids).sum().backward()
            servers.flush()
            moved[rows, unique] = traffic(servers) - before
    assert moved[1000, 10] == moved[1 << 30, 10]
    assert moved[1000, 100] == moved[1 << 30, 100]
    row_bytes = 2 * (8 + 64 * 4)  # looked up and pushed
    assert moved[1000, 100] - moved[1000, 10] == 90 * row_bytes


def test_rows_begin_as_told(servers: ps.Servers) -> None:
    init = ps.Init(ps.Start.CONSTANT, 0.25)
    module = make(servers, init=init, padding_idx=2)
    expected = torch.full((ROWS, DIM), 0.25)
    expected[2] = 0
    assert torch.equal(module.rows(torch.arange(ROWS)), expected)


def test_from_pretrained_uploads_and_freezes(servers: ps.Servers) -> None:
    rows = torch.randn(ROWS, DIM)
    module = ps.EmbeddingBag.from_pretrained(rows, servers=servers, name=next(names), mode="sum")
    assert torch.equal(module(LINE[None])[0], rows[LINE].sum(0))
    assert not module(LINE[None]).requires_grad
    module.freeze = False
    assert module(LINE[None]).requires_grad


def test_write_takes_each_id_once_and_rows_that_fit(servers: ps.Servers) -> None:
    module = make(servers)
    with pytest.raises(BagsError, match="twice"):
        module.write(torch.tensor([1, 1]), torch.zeros(2, DIM))
    with pytest.raises(ValueError, match="rows of shape"):
        module.write(torch.tensor([1]), torch.zeros(2, DIM))


def test_large_transfers_go_in_pieces(servers: ps.Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.ps.client.row_io.PIECE_BYTES", 100)
    module = make(servers)
    rows, order = torch.randn(ROWS, DIM), torch.randperm(ROWS)
    module.write(order, rows)
    twice = torch.cat([order, order]).view(2, ROWS)
    assert torch.equal(module.rows(twice), rows.repeat(2, 1, 1))


def test_lr_goes_with_each_push(servers: ps.Servers) -> None:
    module = make(servers, init=ps.Init(ps.Start.CONSTANT, 0.0))
    for lr in (1.0, 0.25):
        module.lr = lr
        module(LINE[None]).sum().backward()
    assert module.rows(LINE).unique().tolist() == [-1.25]
    assert make(servers, grad_scale=0.5).lr == LR


def test_state_dict_says_where_the_tables_are(servers: ps.Servers) -> None:
    module = make(servers)
    module.lr = 0.125
    state = module.state_dict()
    assert list(state) == ["_extra_state"]
    assert state["_extra_state"] == {"tables_are_on_servers": [module.config.name], "lr": [0.125]}
    same = make(servers, name=module.config.name)
    same.load_state_dict(state)
    assert same.lr == 0.125
    with pytest.raises(ConfigurationError, match="state is of tables"):
        make(servers).load_state_dict(state)
    assert list(module.parameters()) == []


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused(servers: ps.Servers, copied: object) -> None:
    with pytest.raises(NotPicklableError, match="build it anew"):
        copied(make(servers))  # type: ignore[operator]


def test_two_lookups_in_one_graph_are_two_pushes(servers: ps.Servers) -> None:
    module = make(servers, init=ps.Init(ps.Start.CONSTANT, 0.0))
    (module(LINE[None]).sum() + 2 * module(LINE[None]).sum()).backward()
    assert module._tables.pushes == 2
    assert module.rows(LINE).unique().tolist() == [-3 * LR]  # with SGD it is the same as one


def test_no_graph_no_push(servers: ps.Servers) -> None:
    module = make(servers)
    with torch.no_grad():
        assert not module(LINE[None]).requires_grad
    output = module.eval()(LINE[None])
    assert output.requires_grad  # as nn.EmbeddingBag
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(LINE[None]).dtype == torch.float32


def test_an_output_may_be_changed_in_place(servers: ps.Servers) -> None:
    tables = [ps.TableConfig(next(names), ROWS, DIM, mode="sum") for _ in range(2)]
    collection = ps.EmbeddingBagCollection(tables, servers=servers, optimizer=ps.SGD(LR))
    first, second = (table.name for table in tables)
    found = collection({first: LINE[None], second: LINE[None]})
    found[first].mul_(2)
    (found[first].sum() + found[second].sum()).backward()
    assert collection._tables.pushes == 1


def test_a_table_without_a_gradient_is_not_pushed(servers: ps.Servers) -> None:
    """Adam would move its rows by a gradient of zeros, and count a step."""
    tables = [ps.TableConfig(next(names), ROWS, DIM, mode="sum") for _ in range(2)]
    collection = ps.EmbeddingBagCollection(tables, servers=servers, optimizer=ps.Adam(0.1))
    first, second = (table.name for table in tables)
    batch = {first: LINE[None], second: LINE[None]}
    for name in (first, second):
        collection(batch)[name].sum().backward()
    before = collection.rows(second, LINE)
    collection(batch)[first].sum().backward()
    assert torch.equal(collection.rows(second, LINE), before)
    collection.lr = {second: 0.0}
    assert collection.lr == {first: 0.1, second: 0.0}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_dtypes(servers: ps.Servers, dtype: torch.dtype) -> None:
    module = ps.Embedding(ROWS, 3, servers=servers, name=next(names), dtype=dtype)
    rows = torch.randn(ROWS, 3).to(dtype)
    module.write(torch.arange(ROWS), rows)
    module.lr = 1.0
    found = module(LINE)
    assert torch.equal(found, rows[LINE])
    found.sum().backward()
    assert torch.equal(module.rows(LINE), rows[LINE] - 1)


def test_pooling_by_a_server_needs_weights_without_gradient(servers: ps.Servers) -> None:
    module = make(servers, sharding="table", pooling="server")
    weights = torch.ones(3, requires_grad=True)
    module(LINE, ZERO, weights).sum().backward()  # so the trainer pools
    assert weights.grad is not None
