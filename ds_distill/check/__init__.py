"""Everything that can be wrong with a recipe, found before a model is loaded.

`check` asks all and tells it with file and line. A rule is a function that gives each `Mistake`. It
lives by what it is about: one section of a recipe, its validator (`ds_distill.recipe`); one part,
its `mistakes` there; across phases, `phases`; models, `models`; data, `data`, with `labels` for
teachers' labels and `predictions` for their files. Beside them are notes, of what is no mistake.
"""
