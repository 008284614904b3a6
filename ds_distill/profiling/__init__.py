"""Where time and memory go: of a training's steps, and of finished models."""

from __future__ import annotations
