"""Models: configuration, loading, growing a vocabulary, packed inputs, what is read of them.

Begin with `bundle`: the one module that the engine trains, student and frozen teachers together.
`load` reads weights, `encoder` runs a model on a view and gives its `Signals`.
"""
