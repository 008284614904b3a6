"""Recipes and DeepSpeed configs that come with ds_distill, as files."""
