"""The base of all errors. Imported by the other files here."""

from __future__ import annotations

from collections.abc import Sequence


class PacelineError(Exception):
    """Base of everything Paceline raises on purpose.

    Args:
        message: What was expected, what was found, what to do.
        rank: The rank the trouble comes from, where one is known.
        parameters: Names of the parameters concerned.
        operation: What was being done, for example ``"all_reduce of bucket 2"``.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        parameters: Sequence[str] = (),
        operation: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.parameters = tuple(parameters)
        self.operation = operation
