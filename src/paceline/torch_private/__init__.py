"""Every name of torch that torch does not export, with what it does for us, one file for a subject.

Tests look for each in the torch that is installed. When a new torch moves one of them, this is the
place to change; nothing else in the package may reach into a private name. names.py lists them with
what needs each. The lowest layer: imports only torch and errors. A torch that is too old or too
new, or lacks a name, is told of here, once.
"""

import warnings

# Parts of torch that names are looked up in, and that torch's own import leaves out.
import torch
import torch.distributed.algorithms.join
import torch.distributed.autograd
import torch.distributed.utils
import torch.nn.utils.stateless

from paceline.torch_private.names import missing
from paceline.torch_private.versions import complaint_about

if _complaint := complaint_about(torch.__version__, missing()):
    warnings.warn(_complaint, stacklevel=2)
