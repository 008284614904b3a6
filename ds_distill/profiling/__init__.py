"""Where time and memory go: of a training's steps (`trainings`), of finished models (`models`)."""

from __future__ import annotations
