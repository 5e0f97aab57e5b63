"""``python -m benchmarks [NAME] ...``: runs one benchmark; without a name, the step times."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

BENCHMARKS = {
    "ddp_step": "step time beside torch's DDP, interleaved (the default)",
    "collectives": "all_reduce beside gloo, and with --mpi beside Open MPI",
    "memory": "peak memory above the weights, in gradient sets",
    "hooks_link": "step time with communication hooks over links of 1 Gbit/s and 100 Mbit/s",
    "powersgd_compress": "PowerSGD's compression beside torch's",
    "hot_path": "microseconds per gradient, with a profile",
    "ps_lookup": "lookups and pushes through parameter servers, for tables of several sizes",
    "ps_answer": "what one small message costs a parameter server, without its socket",
    "ps_trainer": "a trainer's own share of a step with parameter servers, without the servers",
    "data_parallel": "2 CPU replicas beside the plain module",
    "torch_hangs": "what ranks see when one is killed, stopped or elsewhere, beside torch's DDP",
}


def main(words: Sequence[str]) -> int:
    """Hand over to the benchmark that the first word names."""
    if words and words[0] in ("-h", "--help"):
        print("usage: python -m benchmarks [NAME] [options of NAME, see NAME --help]\n")
        print("\n".join(f"  {name:18} {summary}" for name, summary in BENCHMARKS.items()))
        return 0
    name, rest = "ddp_step", list(words)
    if rest and not rest[0].startswith("-"):
        name, rest = rest[0], rest[1:]
    if name not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        print(f"there is no benchmark {name!r}; there are: {known}", file=sys.stderr)
        return 2
    code: int = importlib.import_module(f"benchmarks.{name}").main(rest)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
