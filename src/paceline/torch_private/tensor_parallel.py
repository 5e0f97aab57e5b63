"""What data parallelism has to do to a module whose parameters are tensor parallel.

Imported when a wrapper is given a slice of a mesh: torch's part takes a while to import.
"""

from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform as convert_module

__all__ = ["convert_module"]
