"""Teachers' words on disk.

words    what is kept of a teacher, and its form in Arrow
format   the folder: manifest, checksums, fingerprints
index    content keys -> row numbers
plan     what a build is of
build    writing: blocks, journal, finish
blocks   reading blocks: checked, memory-mapped, gathered by address
reader   content keys -> signals
"""
