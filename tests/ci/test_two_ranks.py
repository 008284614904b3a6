"""Two ranks whose weights are sharded have the losses of one whose are not: with each kind of rows,
student, head and order of phases. They start once for all recipes."""

import pytest
import torch
import transformers as tr
from ci.test_expand_vocabulary import settings as expanded  # noqa: F401
from ci.test_follow import followed  # noqa: F401
from ci.test_shared_head import TOGETHER, head
from ci.test_students import narrow  # noqa: F401
from runs import alone_and_on_two_ranks, check_same_losses, results
from toys import TINY, recipe_of

TRAININGS = {
    "token-classification": ["first", "second", "average", "gate", "live"],
    "multi-label": ["first", "average", "expertise", "live"],
    "narrow": ["student"],
    "expanded": ["student"],
    "followed": ["live", "from-cache"],
    "heads": ["mobile", "modern", "student"],
    "together": [TOGETHER, "student"],
    "tasks": ["base", "first", "student"],
}
"""Recipe -> its trainings that are compared."""


OWN = {
    "mobilebert": {
        "embedding_size": 16,
        "true_hidden_size": 32,
        "intra_bottleneck_size": 32,
        "hidden_size": 48,
    },
    "modernbert": {"decoder_bias": False, "local_attention": 4},
    "eurobert": {"num_key_value_heads": 2},
}


def masked_lm(family, root, words):
    """Of another model's words."""
    special = {"pad": 0, "bos": 2, "cls": 2, "eos": 3, "sep": 3}
    config = tr.AutoConfig.for_model(
        family,
        vocab_size=tr.AutoConfig.from_pretrained(words).vocab_size,
        max_position_embeddings=128,
        **{f"{name}_token_id": token for name, token in special.items()},
        **{**TINY, **OWN[family]},
    )
    tr.AutoModelForMaskedLM.from_config(config).save_pretrained(root / family)
    tr.AutoTokenizer.from_pretrained(words).save_pretrained(root / family)
    return root / family


@pytest.fixture(scope="module")
def folders(request, materials, toy_task, tiny_models, warm, tmp_path_factory):
    asked, root = request.getfixturevalue, tmp_path_factory.mktemp("ranks")
    places = {"materials": materials, "task": toy_task, "toy": tiny_models["toy"]}
    places |= {family: masked_lm(family, root, materials / "model") for family in OWN}
    of_file = ("token-classification", "multi-label", "together", "tasks", "heads")
    recipes = {
        **{name: recipe_of(name, **places) for name in of_file},
        **{name: asked(name) for name in ("narrow", "expanded", "followed")},
    }
    return alone_and_on_two_ranks(recipes, warm, root)


@pytest.mark.parametrize(
    ("name", "training"), [(name, one) for name, all_ in TRAININGS.items() for one in all_]
)
def test_losses_on_two_ranks_at_stage_3_are_those_on_one_at_stage_0(folders, name, training):
    check_same_losses(folders[name], training)


def test_two_ranks_fit_what_one_does(folders):
    one, two = (
        next(r for r in results(folders["multi-label"] / run)["phases"] if r["kind"] == "expertise")
        for run in ("run", "3")
    )
    assert one["experts"] == two["experts"]


def test_teachers_that_are_trained_together_on_two_ranks_have_one_head(folders):
    reads, spells = (head(folders["together"] / "3", name) for name in ("reads", "spells"))
    assert all(torch.equal(weight, spells[name]) for name, weight in reads.items())
    assert reads["prediction.weight"].any()


def test_one_rank_resamples(folders):
    """The others would only take its memory bandwidth, and as long."""
    found = folders["tasks"].parent.glob("resampled-by-*")
    assert [path.name for path in found] == ["resampled-by-0"]
