"""Runs of one recipe under several settings and seeds."""
