"""A training: set up, its loop, validation and checkpoints. Begin with `loop`."""
