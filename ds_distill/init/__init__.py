"""A first recipe from data and teachers. Begin with `recipe`, which writes it; `guess` says what
the data are."""
