"""Runs of one recipe under several settings and seeds, suites of tasks, finished runs side by side.

Begin with `sweep`, which starts the runs; `found` is what they found, `tables` shows it.
"""
