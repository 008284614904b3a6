"""Runs of one recipe under several settings and seeds, and finished runs side by side.

Begin with `sweep`; `children` starts the runs, `table` and `report` tell what they found.
"""
