"""A student as a file that serves without PyTorch. Begin with `student`: it makes the file,
compares it with the model, and writes it only where it predicts as well."""
