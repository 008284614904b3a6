"""A run: its folder, its phases in order, training, inference, events, publishing.

Begin with `execute` (all phases of a recipe), `context` (`Run`, which every phase receives) and
`training` (the loop). `folder` has the paths, `checkpoints` what a training is resumed from.
"""
