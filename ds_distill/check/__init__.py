"""Everything that can be wrong with a recipe, found before a model is loaded.

`recipe` asks all and tells it with file and line; `needs` has the rules of phases and their parts,
`models` those of configurations and tokenizers, `data` and `labels` those of splits and classes.
"""
