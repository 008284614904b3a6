"""Distil large encoder teachers into small students, in one DeepSpeed engine."""

__version__ = "0.1.0"
