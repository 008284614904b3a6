"""From files to batches: begin with `sources`, what a folder holds, and `batches`, what models get.

`readers`, `words`, `questions` read rows; `columns` makes arrays of a split's columns; `*_windows`
cut long ones; `tokenise` writes each tokenizer's ids once; `masking` hides tokens; `schedule`
orders examples into batches.
"""
