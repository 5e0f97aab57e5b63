"""How buckets travel: implementations of :class:`paceline.types.Transport`."""

from paceline.transport.c10d import C10dTransport

__all__ = ["C10dTransport"]
