"""Teachers' words on disk."""
