"""The learned gate against its equations: what it minimises, how the penalty is chosen."""

import math

import pytest
import torch
import torch.nn.functional as F

from ds_distill.routing.gate import Gate, calibrated_average, features, fit_gate

PENALTIES = (3.0, 1.0, 0.3, 0.1, 0.03)
TEMPERATURES = {"ann": 0.8, "bob": 1.7}


def saying(count, strength, seed, shares=(0.7, 0.2, 0.1)):
    """Two teachers that confuse the classes in their own ways, and folds in turn."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.multinomial(torch.tensor(shares), count, True, generator=generator)
    logits = {}
    for number, name in enumerate(("ann", "bob")):
        logits[name] = torch.randn(count, len(shares), generator=generator)
        logits[name][torch.arange(count), (truth + number) % len(shares)] += strength
    return logits, truth, torch.arange(count) % 5


def standardised(logits):
    """Features with mean 0 and variance 1, and the same fit's offset: float64."""
    raw = features(logits, {}, TEMPERATURES).double()
    mean, deviation = raw.mean(dim=0), raw.std(dim=0, correction=0)
    offset = calibrated_average(logits, TEMPERATURES, {}, 3)
    return (raw - mean) / deviation, mean, deviation, offset


def slopes(gate, logits, truth):
    """Of the mean cross-entropy by W and b of standardised features, and these W and b."""
    x, mean, deviation, offset = standardised(logits)
    weight = gate.weight.double() * deviation[:, None]
    bias = gate.bias.double() + mean @ gate.weight.double()
    wrong = torch.softmax(offset + x @ weight + bias, dim=1) - F.one_hot(truth, 3)
    return x.T @ wrong / len(truth), wrong.mean(dim=0), weight, bias


def fitted_slowly(x, offset, truth, penalty):
    """The least of mean cross-entropy + penalty / 2 |W|^2 + 0.001 / 2 |b|^2, by plain steps."""
    weight = torch.zeros(x.shape[1], 3, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS(
        [weight, bias], max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe"
    )

    def closure():
        search.zero_grad()
        loss = F.cross_entropy(offset + x @ weight + bias, truth)
        loss = loss + penalty / 2 * weight.square().sum() + 1e-3 / 2 * bias.square().sum()
        loss.backward()
        return loss

    search.step(closure)
    return weight.detach(), bias.detach()


def penalty_by_hand(logits, truth, folds):
    """From strong to weak, until the folds left out become less likely."""
    x, _, _, offset = standardised(logits)
    chosen, least = None, math.inf
    for penalty in PENALTIES:
        loss = 0.0
        for fold in range(5):
            out = folds == fold
            weight, bias = fitted_slowly(x[~out], offset[~out], truth[~out], penalty)
            scores = offset[out] + x[out] @ weight + bias
            loss += F.cross_entropy(scores, truth[out], reduction="sum").item()
        if loss >= least:
            return chosen
        chosen, least = penalty, loss
    return chosen


@pytest.mark.parametrize(("penalty", "split"), [(3.0, (40, 0.3, 0)), (0.1, (100, 1.0, 0))])
def test_a_gate_is_the_least_of_its_loss_under_the_penalty_that_folds_choose(penalty, split):
    logits, truth, folds = saying(*split)
    assert penalty_by_hand(logits, truth, folds) == penalty
    gate = fit_gate(logits, {}, TEMPERATURES, truth, folds, {}, 3)
    by_weight, by_bias, weight, bias = slopes(gate, logits, truth)
    # Where the whole loss is least, the slope of the cross-entropy is minus the penalty's.
    torch.testing.assert_close(by_weight, -penalty * weight, rtol=0.02, atol=5e-5)
    torch.testing.assert_close(by_bias, -1e-3 * bias, rtol=0.02, atol=5e-5)
    assert weight.norm() > 0.05 and bias.abs().max() > 0.3


def test_an_absurd_logit_moves_the_target_no_further_than_a_large_one():
    """Energies count up to 100 either way, and what is within counts as it is."""
    generator = torch.Generator().manual_seed(0)
    gate = Gate(torch.randn(8, 3, generator=generator), torch.zeros(3), False)
    scores = torch.randn(5, 3, generator=generator)

    def target(shift):
        teachers = {"ann": scores + shift, "bob": scores.flip(1)}
        logits = gate.logits(teachers, {}, {"ann": 1.0, "bob": 1.0}, {})
        return torch.log_softmax(logits, dim=1)

    for sign in (1, -1):
        edge = target(sign * 110.0)
        torch.testing.assert_close(target(sign * 1000.0), edge, rtol=0, atol=1e-3)
        assert (target(sign * 90.0) - edge).abs().max() > 1
    # float32's largest numbers
    assert torch.isfinite(target(3e38)).all() and torch.isfinite(target(-3e38)).all()
