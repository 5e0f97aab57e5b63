"""The parts of torch's debug server that a page of our own needs."""

from torch.distributed.debug._frontend import DebugHandler, HTTPRequestHandler, NavLink, Route

__all__ = ["DebugHandler", "HTTPRequestHandler", "NavLink", "Route"]
