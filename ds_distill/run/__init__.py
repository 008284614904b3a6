"""What runs a recipe: folder, models, phases in order, training, inference, publishing."""
