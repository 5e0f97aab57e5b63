"""Run one of Accelerate's own test scripts with our Accelerator in its place.

At the end each rank says in a line which groups were made and what models were wrapped in.
"""

import os
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import accelerate
import accelerate.accelerator
import torch.distributed as dist
from accelerate.state import PartialState

from paceline.integrations.accelerate import Accelerator, backend_allowed
from paceline.torch_private.modules import TorchDDP

wrapped: Counter[str] = Counter()
groups: Counter[str] = Counter()
init_process_group, prepare_model = dist.init_process_group, Accelerator.prepare_model


def count_wrapper(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    model = prepare_model(self, *args, **kwargs)
    if isinstance(model, TorchDDP):
        wrapped[type(model).__module__.partition(".")[0]] += 1
    return model


def count_group(*args: Any, **kwargs: Any) -> None:
    init_process_group(*args, **kwargs)
    groups[dist.get_backend()] += 1


def main() -> None:
    accelerate.Accelerator = accelerate.accelerator.Accelerator = Accelerator
    # In place, not in a class of its own: a script pickles its accelerator.
    Accelerator.prepare_model = count_wrapper  # type: ignore[method-assign]
    dist.init_process_group = count_group
    folder = Path(accelerate.__file__).parent / "test_utils" / "scripts"
    if "state" in sys.argv:
        # The script asks for its state without a word of CPUs: it would be one process by itself.
        with backend_allowed():
            PartialState(cpu=True)
    runpy.run_path(str(folder / sys.argv[1]), run_name="__main__")
    # In one piece: ranks share the output.
    os.write(1, f"\nused: groups {dict(groups)}, wrappers {dict(wrapped)}\n".encode())


if __name__ == "__main__":
    main()
