"""Engines: what generates responses."""

from tba.engines.base import Engine, Sampling

__all__ = ["Engine", "Sampling"]
