"""What a recipe needs before it runs: memory, time, and whether a cache pays.

Models are built on torch's meta device, which has shapes and no memory, and run there by the code
of transformers; nothing here starts an engine or loads weights.
"""
