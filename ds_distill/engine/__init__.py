"""DeepSpeed: initialise, step, checkpoint, teacher placement. No other package imports it.

Only `engine`, `internals` (all that is private to DeepSpeed), `placement`, `training_state` and
`world` import deepspeed, which takes seconds: commands that start no engine import none of them.
`config` does not even import torch.
"""
