"""Data: readers, content keys, tokenising, masking, batches."""
