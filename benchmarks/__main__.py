"""``python -m benchmarks [NAME] ...``: a subject of ``paceline bench``, or one for developers.

Without a name: ``ddp``. A benchmark's module has ``add_arguments(parser)`` and ``run(args)``, as
the subjects of ``paceline bench`` have, and is run in the same way.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from paceline.cli import INTERRUPTED
from paceline.cli.bench import SUBJECTS
from paceline.cli.bench.harness.subject import run_subject

OURS = {
    "memory": "peak memory above the weights, in gradient sets",
    "hooks_link": "step time with communication hooks over links of 1 Gbit/s and 100 Mbit/s",
    "powersgd_compress": "PowerSGD's compression beside torch's",
    "recording": "what recording every step costs, as a share of the step",
    "shards": "what logical shards cost beside ordinary accumulation, in time and memory",
    "replicas": "what check_every=100 costs, as a share of the step",
    "hot_path": "microseconds per gradient, with a profile",
    "ps_lookup": "lookups and pushes through parameter servers, for tables of several sizes",
    "ps_answer": "what one small message costs a parameter server, without its socket",
    "ps_trainer": "a trainer's own share of a step with parameter servers, without the servers",
    "frameworks": "a step inside of Lightning, Accelerate, Transformers and Ray Train",
    "torch_hangs": "what ranks see when one is killed, stopped or elsewhere, beside torch's DDP",
}


def main(words: Sequence[str]) -> int:
    """Hand over to the benchmark that the first word names."""
    if words and words[0] in ("-h", "--help"):
        print("usage: python -m benchmarks [NAME] [options of NAME, see NAME --help]\n")
        print("\n".join(f"  {name:18} {text}" for name, text in (SUBJECTS | OURS).items()))
        return 0
    name, rest = "ddp", list(words)
    if rest and not rest[0].startswith("-"):
        name, rest = rest[0], rest[1:]
    if name not in SUBJECTS | OURS:
        known = ", ".join(SUBJECTS | OURS)
        print(f"there is no benchmark {name!r}; there are: {known}", file=sys.stderr)
        return 2
    package = "paceline.cli.bench" if name in SUBJECTS else "benchmarks"
    subject = importlib.import_module(f"{package}.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=subject.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subject.add_arguments(parser)
    try:
        return run_subject(parser.prog, subject.run, parser.parse_args(rest))
    except KeyboardInterrupt:
        print("\ninterrupted; all ranks are stopped", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
