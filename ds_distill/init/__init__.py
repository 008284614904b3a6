"""A first recipe from data and teachers."""

DEFAULT_TEACHER = "FacebookAI/roberta-large"
"""Where no teacher is given: fine-tuned by the recipe."""
