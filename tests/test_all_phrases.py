"""No text that torch raises or warns of is forgotten: each is in a table of phrases, or excluded.

The texts are read from the sources of the torch that is installed. Tables are compared with ours by
``test_phrases.py`` here and in ``tests/ddp/wrapper/``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator

import pytest
import torch

from tests import test_phrases
from tests.ddp.wrapper import test_phrases as wrapper

HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"
AVERAGING = "torch.distributed.algorithms.model_averaging"
MODULES = [
    *(f"torch.nn.parallel.{name}" for name in ("distributed", "data_parallel", "parallel_apply")),
    *(f"torch.nn.parallel.{name}" for name in ("replicate", "scatter_gather", "_functions")),
    *(f"{HOOKS}.{name}_hook" for name in ("post_localSGD", "powerSGD")),
    *(f"{HOOKS}.{name}" for name in ("default_hooks", "quantization_hooks", "debugging_hooks")),
    *(f"{AVERAGING}.{name}" for name in ("averagers", "hierarchical_model_averager", "utils")),
    "torch.distributed.algorithms.join",
    "torch.distributed.optim.post_localSGD_optimizer",
]

# Phrases that tests other than the tables compare.
ELSEWHERE = [
    "Rank 0 exhausted all inputs.",
    "Detected at least one rank that exhausted inputs.",
    test_phrases.SCALARS,
    "children of ScriptModule",
    test_phrases.NO_DEVICES,
    test_phrases.TOO_EARLY,
]

INSIDE = "says that torch's own code is wrong; ours has no such state"
RUNS_TORCHS = "torch's own code says it about ours, too: that part is inherited or called"
ACCELERATOR = "is about accelerators"
# torch's phrase: why ours has none.
NOT_OURS = {
    ".logger must not be None": INSIDE,
    "self.logger must not be None when static_graph is True": INSIDE,
    "Expected param to name mapping to cover all parameters": INSIDE,
    "found in module parameters, but not DDP parameters": INSIDE,
    "BUG! Expected rank_cond to be true": INSIDE,
    "module_kwargs should not be None after scatter_kwargs": INSIDE,
    "DDP join hook requires passing in a DistributedDataParallel instance": INSIDE,
    "The join context manager requires at least one joinable": RUNS_TORCHS,
    "constructor calls the ``Joinable`` constructor": RUNS_TORCHS,
    "Detected uneven input skew of greater than": RUNS_TORCHS,
    "BF16 all reduce communication hook required CUDA 11+": ACCELERATOR,
    "No available accelerator found.": ACCELERATOR,
    "Expected current accelerator type": ACCELERATOR,
    "Broadcast function not implemented for CPU tensors": "ours copies on CPU",
    "Gather function not implemented for CPU tensors": "ours gathers on CPU",
    "imbalance_warn": "is about the memory of several accelerators",
    "when using bucket_cap_mb_list, python reducer is not supported": "there is no such reducer",
    "does not support overlapped DDP": RUNS_TORCHS,
}


def texts_in(module: str) -> Iterator[str]:
    """What is raised or warned of; {} for what is filled in. Without a text: nothing."""
    for node in ast.walk(ast.parse(inspect.getsource(importlib.import_module(module)))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield text_of(node.exc.args[0])
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "warnings.warn":
                yield text_of(node.args[0])
            elif name == "self._log_and_throw":
                yield text_of(node.args[1])


def text_of(node: ast.expr) -> str:
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(map(text_of, node.values))
        case ast.BinOp():
            return text_of(node.left) + text_of(node.right)
        case ast.Call(func=ast.Attribute(value=template, attr="format")):
            return text_of(template)
        case ast.Name():
            return node.id
    return "{}"


def longest_part(template: str) -> str:
    return max(template.replace("{!r}", "{}").split("{}"), key=len)


def known_phrases() -> list[str]:
    pairs = {**test_phrases.DP, **test_phrases.NN, **test_phrases.SHARDS}
    phrases = [pair.phrase for pair in pairs.values()]
    phrases += [phrase for phrase, _ in test_phrases.AVERAGERS.values()]
    phrases += [phrase for phrase, _ in test_phrases.AVERAGERS_WARN]
    phrases += [phrase for _, phrase in (*wrapper.MISTAKES.values(), *wrapper.WARNED.values())]
    return phrases + ELSEWHERE


def is_about(phrase: str, template: str) -> bool:
    return phrase in template or longest_part(template) in phrase


# What only names a variable that is raised again says nothing.
HANDED_ON = {"err_msg"}


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the tables are those of torch 2.13"
)
def test_each_text_of_torch_is_in_a_table_or_excluded() -> None:
    found = {text for module in MODULES for text in texts_in(module)} - HANDED_ON
    assert len(found) > 50
    phrases = known_phrases()
    compared = {text for text in found if any(is_about(phrase, text) for phrase in phrases)}
    excluded = {text for text in found if any(is_about(phrase, text) for phrase in NOT_OURS)}
    assert found - compared - excluded == set()
    assert not compared & excluded
    assert [p for p in NOT_OURS if not any(is_about(p, text) for text in found)] == []
