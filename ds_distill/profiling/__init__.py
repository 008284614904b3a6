"""Memory and time, measured."""
