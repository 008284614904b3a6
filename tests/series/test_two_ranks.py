"""Two ranks at stage 3 have the losses of one at stage 0, with the kinds of rows that test-ci
leaves out."""

from runs import alone_and_on_two_ranks, check_same_losses
from toys import recipe_of

KINDS = ("regression", "extractive-qa", "character-spans")


def test_losses_on_two_ranks_at_stage_3_are_those_on_one_at_stage_0(materials, warm, tmp_path):
    recipes = {kind: recipe_of(kind, materials=materials) for kind in KINDS}
    for folder in alone_and_on_two_ranks(recipes, warm, tmp_path).values():
        for training in ("first", "second", "average", "live"):
            check_same_losses(folder, training)
