"""Modules that work across ranks."""
