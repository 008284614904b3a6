"""What a run does with caches of teachers' signals: build, what is missing, fidelity, codecs.
Begin with `build`.
"""
