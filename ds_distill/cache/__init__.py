"""Teacher signals on disk. Begin with `schema`, what a record is, and `reader`; how a build writes
them is in `build` and `build_plan`.

schema   which signals of a teacher are stored, and their columns in Arrow
format   the folder: manifest, checksums, fingerprints
index    content keys -> record indices
blocks   reading blocks: memory-mapped, checked, gathered
reader   content keys -> signals
codecs   compressed distributions over a vocabulary
inspect  a description of a cache for the user
"""
