"""Running a recipe: run folder, models, phases in order, training, inference, publishing."""
