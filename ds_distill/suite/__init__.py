"""Checkpoints fine-tuned and judged on many tasks."""
