"""Checkpoints that do not care whether the module was wrapped: the prefix ``module.`` of names.

The wrapper's ``state_dict()`` keeps torch's names, because programs and checkpoints count on them.
A base of the wrapper; knows nothing of ranks and reductions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.torch_private.modules import TorchDDP


class StateNames(TorchDDP):
    """State with and without the prefix of the wrapper."""

    def unwrapped_state_dict(self) -> dict[str, Any]:
        """The state under the module's own names: one process can load it as it is."""
        state: dict[str, Any] = self.module.state_dict()
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state of the wrapper, or of the module alone: names tell which one it is."""
        if self._is_of_the_module(state_dict):
            return self.module.load_state_dict(state_dict, strict=strict, assign=assign)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _is_of_the_module(self, state_dict: Mapping[str, Any]) -> bool:
        """Whether it has names of the module's state, and none of the wrapper's.

        A module that has a child called ``module`` is told apart, too.
        """
        own = set(self.module.state_dict(keep_vars=True))
        names = set(state_dict)
        return bool(names & own) and not names & {f"module.{name}" for name in own}
