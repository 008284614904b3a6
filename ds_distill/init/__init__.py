"""A first recipe from data and teachers. Begin with `recipe`, which writes it; `guess` says what
the data are."""

DEFAULT_TEACHER = "FacebookAI/roberta-large"
"""Where no teacher is given: fine-tuned by the recipe."""
