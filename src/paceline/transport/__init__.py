"""How buckets travel: implementations of :class:`paceline.types.Transport`."""

from paceline.transport.c10d import C10dTransport
from paceline.transport.choose import DeferredTransport
from paceline.transport.shm import ShmTransport

__all__ = ["C10dTransport", "DeferredTransport", "ShmTransport"]
