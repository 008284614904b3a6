"""What the compiler made of a launch: registers, spills, memory, instructions of each loop."""

from . import amd, nvidia
from .program import Compiled, Loop

__all__ = ["Compiled", "Loop", "amd", "nvidia"]
