"""Collectives on CPU tensors: on one host through shared memory, and over several hosts."""
