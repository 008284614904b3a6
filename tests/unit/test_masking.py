"""BERT's masking rule, counted over 150,000 tokens: what each is turned into, and on what that
depends. Bounds are five standard errors of a fair count; keys, and so the counts, are fixed."""

import math
from dataclasses import replace

import pytest
import torch

from ds_distill.data.masking import Masking, mask_view
from ds_distill.keys import content_keys
from ds_distill.recipe.tasks import MaskedLM
from ds_distill.tasks.masked_lm import MaskedLMKind
from ds_distill.views import PaddedView

EXAMPLES, LENGTH = 2500, 64
VOCABULARY, MASK, SPECIAL = 40, 4, (0, 1, 2, 3, 4)
ALIKE = 20
"""The one token of texts whose tokens are all alike."""
RATE = 0.15
MASKING = Masking(RATE, mask_id=MASK, special_ids=SPECIAL, known=VOCABULARY, seed=0)


def make_view(examples=EXAMPLES):
    """Texts of unlike lengths between [CLS] and [SEP], with specials in between; what stands
    after the end is no special id, so that the attention mask alone tells it apart."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(SPECIAL), VOCABULARY, (examples, LENGTH), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.03] = 1  # [UNK]
    ids[:, 0], ids[:, 20] = 2, MASK
    lengths = LENGTH - torch.arange(examples) % 4
    inside = torch.arange(LENGTH) < lengths[:, None]
    ids[torch.arange(examples), lengths - 1] = 3
    keys = content_keys([f"text {number}" for number in range(examples)])
    return PaddedView(ids, inside.long()), torch.from_numpy(keys)


def chosen_of(view, keys, masking=MASKING, epoch=0):
    """Which tokens are chosen, bool [B, S], and what all are shown as."""
    masked, labels = mask_view(view, keys, masking, epoch)
    chosen = torch.zeros(view.input_ids.numel(), dtype=torch.bool)
    chosen[masked.positions] = True
    assert len(chosen.nonzero()) == len(masked.positions) == len(labels)
    assert torch.equal(labels, view.input_ids.flatten()[masked.positions])
    assert torch.equal(masked.attention_mask, view.attention_mask)
    return chosen.view_as(view.input_ids), masked.input_ids


def check_share(found, share):
    """found: bool, of independent trials that are true with this probability."""
    error = math.sqrt(share * (1 - share) / found.numel())
    assert found.double().mean().item() == pytest.approx(share, abs=5 * error)


def check_uniform(counts):
    """Chi-square of counts of equally likely things, as a normal deviate (Wilson, Hilferty)."""
    freedom, expected = len(counts) - 1, counts.sum() / len(counts)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    variance = 2 / (9 * freedom)
    assert ((chi_square / freedom) ** (1 / 3) - (1 - variance)) / math.sqrt(variance) < 5


@pytest.mark.parametrize("rate", [RATE, 0.4])
def test_tokens_are_masked_at_the_rate_and_80_10_10(rate):
    view, keys = make_view()
    chosen, shown = chosen_of(view, keys, replace(MASKING, rate=rate))
    eligible = ~torch.isin(view.input_ids, torch.tensor(SPECIAL)) & (view.attention_mask == 1)
    assert eligible.sum() > 140_000
    assert not chosen[~eligible].any()  # specials and padding
    assert torch.equal(shown[~chosen], view.input_ids[~chosen])
    check_share(chosen[eligible], rate)
    true, now = view.input_ids[chosen], shown[chosen]
    # A random token may be [MASK], or the token itself.
    check_share(now == MASK, 0.8 + 0.1 / VOCABULARY)
    check_share(now == true, 0.1 + 0.1 / VOCABULARY)
    others = now[(now != MASK) & (now != true)]
    assert len(others) > 1000
    # Every id but [MASK] is as likely as every other, the first and the last included.
    counts = torch.bincount(others, minlength=VOCABULARY).double()
    expected = rate * eligible.sum() * 0.1 / VOCABULARY
    likely = torch.full((VOCABULARY,), float(expected), dtype=torch.float64)
    likely[len(SPECIAL) :] *= 1 - 1 / (VOCABULARY - len(SPECIAL))  # it was the token itself
    likely[MASK] = 0.0
    assert counts[MASK] == 0
    assert ((counts - likely).abs() < 5 * expected.sqrt()).all()


def test_what_is_shown_does_not_depend_on_what_was_chosen():
    """At a rate of 1 every random number is seen: in whole, and within a share of the others."""
    view, keys = make_view()
    view = replace(view, input_ids=torch.full_like(view.input_ids, ALIKE))
    all_chosen, shown = chosen_of(view, keys, replace(MASKING, rate=1.0))
    few, few_shown = chosen_of(view, keys)
    assert torch.equal(all_chosen, view.attention_mask == 1)
    for which, what in ((all_chosen, shown), (few, few_shown)):
        assert torch.equal(what[which], shown[which])  # the rate decides which, not what
        kept, hidden = what[which] == ALIKE, what[which] == MASK
        check_share(kept, 0.1 + 0.1 / VOCABULARY)
        check_share(hidden, 0.8 + 0.1 / VOCABULARY)
        counts = torch.bincount(what[which][~kept], minlength=VOCABULARY)
        assert len(counts) == VOCABULARY
        others = (torch.arange(VOCABULARY) != MASK) & (torch.arange(VOCABULARY) != ALIKE)
        check_uniform(counts[others])


def test_neighbours_epochs_seeds_and_texts_draw_independently():
    view, keys = make_view()
    view = replace(view, input_ids=torch.full_like(view.input_ids, ALIKE))
    chosen, shown = chosen_of(view, keys)
    check_share((chosen[:, 1:] & chosen[:, :-1])[view.attention_mask[:, 1:] == 1], RATE**2)
    others = {
        "epoch": chosen_of(view, keys, epoch=1),
        "far epoch": chosen_of(view, keys, epoch=1_000_003),
        "seed": chosen_of(view, keys, replace(MASKING, seed=1)),
        "text": chosen_of(view, keys.roll(1, 0)),
        "swapped halves of a key": chosen_of(view, keys.flip(1)),
    }
    for name, (other, other_shown) in others.items():
        both = chosen & other
        check_share(both[view.attention_mask == 1], RATE**2)
        # Of tokens that both choose: two samples from 80, 10, 10.
        same = shown[both] == other_shown[both]
        hidden, kept, random = 0.8 + 0.1 / VOCABULARY, 0.1 + 0.1 / VOCABULARY, 0.1 / VOCABULARY
        check_share(same, hidden**2 + kept**2 + (VOCABULARY - 2) * random**2)
        assert len(same) > 3000, name


def test_a_mask_belongs_to_the_text():
    """Not to its position in the batch, its neighbours, or the padding that they make."""
    view, keys = make_view(200)
    chosen, shown = chosen_of(view, keys, epoch=3)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))[:70]
    some = PaddedView(view.input_ids[order], view.attention_mask[order])
    again, again_shown = chosen_of(some, keys[order], epoch=3)
    assert torch.equal(again, chosen[order]) and torch.equal(again_shown, shown[order])
    wide = PaddedView(
        torch.nn.functional.pad(view.input_ids, (0, 9), value=7),
        torch.nn.functional.pad(view.attention_mask, (0, 9)),
    )
    wider, wider_shown = chosen_of(wide, keys, epoch=3)
    assert torch.equal(wider[:, :LENGTH], chosen) and torch.equal(wider_shown[:, :LENGTH], shown)
    assert not wider[:, LENGTH:].any()


@pytest.mark.parametrize("rate", [RATE, 0.4])
def test_tokens_that_a_teacher_does_not_know_are_always_masked(rate):
    """The others as if there were none of these, and no model sees one."""
    view, keys = make_view()
    known = 30
    masking = replace(MASKING, rate=rate, known=known)
    new = (view.input_ids >= known) & (view.attention_mask == 1)
    assert new.sum() > 10_000
    chosen, shown = chosen_of(view, keys, masking)
    assert chosen[new].all() and (shown[new] == MASK).all()
    assert (shown[view.attention_mask == 1] < known).all()
    old = replace(view, input_ids=torch.where(new, 1, view.input_ids))  # 1: [UNK], never masked
    expected, shown_there = chosen_of(old, keys, masking)
    assert torch.equal(chosen & ~new, expected)
    assert torch.equal(shown[~new], shown_there[~new])
    special = torch.isin(view.input_ids, torch.tensor(SPECIAL))
    check_share(chosen[~new & ~special & (view.attention_mask == 1)], rate)


def test_all_that_is_masked_may_be_shown_as_the_mask():
    view, keys = make_view()
    chosen, _ = chosen_of(view, keys)
    same, shown = chosen_of(view, keys, replace(MASKING, shown="mask"))
    assert torch.equal(same, chosen)
    assert torch.equal(shown, torch.where(chosen, MASK, view.input_ids))


def test_a_cache_of_before_is_known_by_the_same_rule():
    """Those of BERT's rule did not say what masked tokens are shown as."""
    for shown, said in {"bert": None, "mask": "mask"}.items():
        settings = {"type": "masked-lm", "data": {"path": "x"}, "masking": {"shown": shown}}
        kind = MaskedLMKind(MaskedLM.model_validate(settings), [])
        assert kind.fingerprint(None)["masking"].get("shown") == said
