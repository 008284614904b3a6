"""The kinds of task: what differs between them, one file each."""

from ds_distill.tasks.kind import TaskKind

__all__ = ["TaskKind"]
