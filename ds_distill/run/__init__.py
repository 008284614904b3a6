"""A run: its folder, its phases in order, events, publishing.

Begin with `execute` (all phases of a recipe) and `run` (`Run`, which phases receive); `folder`
has the paths. Trainings are in `ds_distill.training`.
"""
