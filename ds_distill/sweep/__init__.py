"""Runs of one recipe under several settings and seeds, suites of tasks, finished runs side by side.

Begin with `sweep`; `run_processes` starts the runs, `table` tells what they found.
"""
