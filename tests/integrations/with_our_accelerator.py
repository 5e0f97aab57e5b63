"""Run one of Accelerate's own test scripts with our Accelerator in its place."""

import runpy
import sys
from pathlib import Path

import accelerate
import accelerate.accelerator

from paceline.integrations.accelerate import Accelerator

accelerate.Accelerator = accelerate.accelerator.Accelerator = Accelerator

if __name__ == "__main__":
    folder = Path(accelerate.__file__).parent / "test_utils" / "scripts"
    runpy.run_path(str(folder / sys.argv[1]), run_name="__main__")
