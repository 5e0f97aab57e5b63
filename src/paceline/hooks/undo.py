"""Before-images of what a hook remembers: the way back to the last step that counts.

Made by :class:`paceline.hooks.layout.Memory`, used by :class:`paceline.hooks.state.HookState`. A
step that fails in the middle has changed some of what a hook remembers. With ``is_on``, the first
change of a tensor after a mark copies it, on the thread that changes it, beside the backward; a
mark itself copies nothing.

[Note: marks]
    mark()       what there is now counts: images are forgotten, their memory is used again
    before(t)    the tensor ``t`` is about to change: keep an image, if there is none yet
    roll_back()  every tensor that has an image gets it back

Which tensors there are is for the owner to remember: it keeps its dicts, whose tensors are changed
in place or replaced, never resized.
"""

from __future__ import annotations

import torch

_Kind = tuple[torch.device, torch.dtype, torch.Size]


class UndoLog:
    """Images of tensors, since the last mark.

    Attributes:
        is_on: False until the first mark: nobody wants to go back, and nothing is copied.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._images: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._spare: dict[_Kind, list[torch.Tensor]] = {}

    def mark(self) -> None:
        """What there is now counts."""
        self.is_on = True
        for _, image in self._images.values():
            self._spare.setdefault(_kind(image), []).append(image)
        self._images.clear()

    def before(self, *tensors: torch.Tensor) -> None:
        """These tensors are about to change in place."""
        if not self.is_on:
            return
        for tensor in tensors:
            if id(tensor) not in self._images:
                spare = self._spare.get(_kind(tensor))
                image = spare.pop() if spare else torch.empty_like(tensor)
                # The tensor is held, too: its id is its own only as long as it lives.
                self._images[id(tensor)] = tensor, image.copy_(tensor)

    def roll_back(self) -> None:
        """Make every tensor as it was at the mark."""
        for tensor, image in self._images.values():
            tensor.copy_(image)
        self.mark()

    def forget(self) -> None:
        """Give all memory back: what is remembered has been replaced."""
        self._images.clear()
        self._spare.clear()


def _kind(tensor: torch.Tensor) -> _Kind:
    return tensor.device, tensor.dtype, tensor.shape
