"""What a recipe's phases do."""
