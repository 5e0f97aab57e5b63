"""``replicate``: copies of a module that share its parameters where the device is the same.

Called by :class:`paceline.dp.DataParallel` and by users.

[Note: what a replica shares]
On the module's own device a parameter is not copied. Each replica gets an *alias*
(``parameter[...]``, whose derivative is the identity): the same memory, but no leaf. So gradients
of all replicas, dense or sparse, meet at the parameter, where autograd adds them up before hooks,
``AccumulateGrad`` and everything else that knows the parameter sees them: as for a module that is
used several times.
The parameter itself would do for that, but autocast would then cache its cast for all threads, and
which replicas add up in low precision would depend on timing.

A buffer is given to the *first* replica on the module's device as it is, so what that replica
writes is the module's state. All others get copies, made before any replica runs: no replica reads
what another one writes. On another device, parameters are copied once per device and gradients flow
back through the copy.

A replica has no parameters of its own, as in torch: they are attributes, and in
``_former_parameters``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.dp.devices import DeviceLike, copy_to, parse_devices
from paceline.errors import PlacementError, UntrainableModuleError
from paceline.torch_private.modules import replicate_as_torch, replicates_itself

M = TypeVar("M", bound=nn.Module)


def replicate(network: M, devices: Sequence[DeviceLike], detach: bool = False) -> list[M]:
    """Return one replica of a module for each device.

    Args:
        network: The module; its parameters may lie on any device.
        devices: Where the replicas run, CPU entries included; a device may be there several times.
        detach: No gradient flows from the replicas back to the module.

    Raises:
        UntrainableModuleError: If a parameter has no shape yet.
        PlacementError: If the module holds a ScriptModule.
    """
    modules = list(walk(network))
    for name, module in modules:
        _check_replicable(name, module)
    plain = [module for _, module in modules]
    targets = parse_devices(devices)
    copier = _Copier(detach)
    return [cast(M, _copy_modules(plain, copier, device)) for device in targets]


def walk(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once with its name, parents first. Faster than ``named_modules``."""
    seen = {id(root)}
    waiting = [("", root)]
    while waiting:
        name, module = waiting.pop()
        yield name, module
        for key, child in module._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append((f"{name}.{key}" if name else key, child))


def _check_replicable(name: str, module: nn.Module) -> None:
    for key, parameter in module._parameters.items():
        if parameter is not None and is_lazy(parameter):
            raise UntrainableModuleError(
                "Modules with uninitialized parameters can't be used with DataParallel: "
                f"{f'{name}.' if name else ''}{key} has no shape yet. Run one batch through the "
                "module first.",
                parameters=[f"{name}.{key}" if name else key],
            )
    if isinstance(module, torch.jit.ScriptModule):
        raise PlacementError(
            "Cannot replicate network where python modules are children of ScriptModule: "
            f"{name or 'the module'} is one ({type(module).__name__}). Wrap the Python module that "
            "it was made from."
        )


class _Copier:
    """Makes the tensors of replicas; remembers what it has made for which device."""

    def __init__(self, detach: bool) -> None:
        self._detach = detach
        self._copies: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._is_buffer_lent: set[int] = set()

    def parameter(self, parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return an alias on the parameter's own device, else of one copy per device."""
        if parameter.device == device:
            source = parameter
        else:
            key = (id(parameter), device)
            if key not in self._copies:
                self._copies[key] = copy_to(self._leave(parameter), device)
            source = self._copies[key]
        return source.detach() if self._detach else source[...]

    def buffer(self, buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the buffer itself to the first replica on its device, to all others a copy."""
        source = self._leave(buffer)
        if buffer.device != device:
            return copy_to(source, device)
        if id(buffer) in self._is_buffer_lent:
            return source.clone()
        self._is_buffer_lent.add(id(buffer))
        return source

    def _leave(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach() if self._detach and tensor.requires_grad else tensor


def _copy_modules(modules: list[nn.Module], copier: _Copier, device: torch.device) -> nn.Module:
    copies = {id(module): _shallow_copy(module) for module in modules}
    # By identity: what is shared in the module is shared in the replica, too.
    made: dict[int, torch.Tensor] = {}
    for module in modules:
        copied = copies[id(module)]
        children: dict[str, nn.Module | None] = copied._modules
        for key, child in module._modules.items():
            children[key] = None if child is None else copies[id(child)]
        if module._parameters:
            _give_parameters(copied, module, copier, device, made)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in made:
                    made[id(buffer)] = copier.buffer(buffer, device)
                copied._buffers[key] = made[id(buffer)]
    return copies[id(modules[0])]


def _give_parameters(
    copied: nn.Module,
    module: nn.Module,
    copier: _Copier,
    device: torch.device,
    made: dict[int, torch.Tensor],
) -> None:
    attributes = copied.__dict__
    former = attributes["_former_parameters"]
    sets_as_usual = type(copied).__setattr__ is nn.Module.__setattr__
    for key, parameter in module._parameters.items():
        if parameter is None:
            copied._parameters[key] = None
            continue
        alias = made.get(id(parameter))
        if alias is None:
            alias = made[id(parameter)] = copier.parameter(parameter, device)
        former[key] = alias
        if sets_as_usual:
            attributes[key] = alias
        else:  # an RNN keeps its list of flat weights this way
            setattr(copied, key, alias)


def _shallow_copy(module: nn.Module) -> nn.Module:
    """Copy a module without what it holds; as torch does it, and as a module may do it itself."""
    kind = type(module)
    if replicates_itself(kind):
        made = replicate_as_torch(module)
        made.__dict__["_former_parameters"] = {}
        return made
    copied: nn.Module = kind.__new__(kind)
    attributes = copied.__dict__
    attributes.update(module.__dict__)
    # Around Module.__setattr__, which takes most of the time.
    attributes["_parameters"] = {}
    attributes["_buffers"] = module._buffers.copy()
    attributes["_modules"] = module._modules.copy()
    attributes["_is_replica"] = True
    attributes["_former_parameters"] = {}
    return copied


def adopt_buffers(module: nn.Module, replica: nn.Module) -> None:
    """Take over the buffers that a replica has replaced (``self.count = self.count + 1``).

    What it wrote in place is the module's already. A buffer that requires grad stays the module's.
    """
    waiting = [(module, replica)]
    while waiting:
        mine, theirs = waiting.pop()
        _adopt(mine._buffers, theirs._buffers)
        for key, child in mine._modules.items():
            copied = theirs._modules.get(key)
            # A child that the forward has put there itself is no copy of this one.
            if child is not None and copied is not None and "_is_replica" in copied.__dict__:
                waiting.append((child, copied))


def _adopt(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    for key, new in theirs.items():
        old = mine.get(key)
        if new is not old and not (old is not None and old.requires_grad):
            mine[key] = new
