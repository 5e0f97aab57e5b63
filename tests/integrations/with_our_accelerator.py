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

from paceline.integrations.accelerate import Accelerator, backend_allowed
from paceline.torch_private.modules import TorchDDP

wrapped: Counter[str] = Counter()
groups: Counter[str] = Counter()
init_process_group = dist.init_process_group


class Counting(Accelerator):
    """Counts the wrappers that it makes."""

    def prepare_model(self, *args: Any, **kwargs: Any) -> Any:
        model = super().prepare_model(*args, **kwargs)
        if isinstance(model, TorchDDP):
            wrapped[type(model).__module__.partition(".")[0]] += 1
        return model


def count_group(*args: Any, **kwargs: Any) -> None:
    init_process_group(*args, **kwargs)
    groups[dist.get_backend()] += 1


def main() -> None:
    accelerate.Accelerator = accelerate.accelerator.Accelerator = Counting
    dist.init_process_group = count_group
    folder = Path(accelerate.__file__).parent / "test_utils" / "scripts"
    with backend_allowed():  # one script makes no Accelerator, only its state
        runpy.run_path(str(folder / sys.argv[1]), run_name="__main__")
    # In one piece: ranks share the output.
    os.write(1, f"\nused: groups {dict(groups)}, wrappers {dict(wrapped)}\n".encode())


if __name__ == "__main__":
    main()
