"""This process and the others of a run: locks, signals, failures, where ranks meet, what each
does at the moment. Begin with `lock` and `signals`.
"""
