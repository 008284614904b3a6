"""Everything that can be wrong with a recipe, found before a model is loaded."""
