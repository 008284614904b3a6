"""Starting a run on many ranks, and ending all of it again.

`ds-distill launch` starts one agent per host. An agent is the parent of everything that the run
starts there, and stops it when its own input ends.
"""
