"""The kinds of task: what differs between them, one file each.

Begin with `kind`. `data` has the splits that a kind is given.
"""

from ds_distill.tasks.kind import TaskKind

__all__ = ["TaskKind"]
