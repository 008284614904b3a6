"""Teacher signals on disk.

schema   which signals of a teacher are stored, and their columns in Arrow
format   the folder: manifest, checksums, fingerprints
index    content keys -> record indices
plan     which records a build will write
build    writing blocks and journals, finishing a cache
blocks   reading blocks: memory-mapped, checked, gathered by address
reader   content keys -> signals
codecs   compressed distributions over a vocabulary
compare  size and KL divergence of each codec
inspect  a description of a cache for the user
"""
