"""Checkpoints fine-tuned and judged on many tasks: a suite is a sweep whose runs differ by task.

Begin with `runs`; `schema` has the keys of a suite's file, `results` its tables.
"""
