"""What else was tried: targets that are no policy of the package, by their accuracy on test."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from ds_distill.routing import gate as gates
from ds_distill.routing.calibration import fit_temperature, prior_of
from ds_distill.routing.fitted import folds_of, states_of
from ds_distill.routing.gate import calibrated_average, features, fit_gate
from ds_distill.types import Signals

SignalSchema = Mapping[str, Signals]


def variants(
    signals: SignalSchema,
    truth: np.ndarray,
    group_keys: torch.Tensor,
    words_test: SignalSchema,
    truth_test: np.ndarray,
) -> dict[str, float]:
    """Fitted on the routing split, right on test. group_keys: int64 [N, 2], see `Examples`."""
    known = torch.from_numpy(truth).long()
    names = sorted(signals)
    logits, logits_test = logits_of(signals), logits_of(words_test)
    classes = logits[names[0]].shape[1]
    temperatures = {name: fit_temperature(logits[name], known) for name in names}

    def probabilities(scores: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [torch.softmax(scores[name].double() / temperatures[name], dim=1) for name in names]

    outputs, said_test = probabilities(logits), probabilities(logits_test)
    prior = prior_of(known, classes)
    is_class = F.one_hot(known, classes).double()
    found: dict[str, torch.Tensor] = {
        "average of probabilities": sum(
            (torch.softmax(scores, dim=1) for scores in logits_test.values()), torch.zeros(())
        ),
        "product of calibrated probabilities": sum((p.log() for p in said_test), torch.zeros(())),
    }
    hard, soft, columns = prior.log(), prior.log(), prior.log()
    for p, asked in zip(outputs, said_test, strict=True):
        counts = is_class.T @ F.one_hot(p.argmax(dim=1), classes).double() + 1 / classes
        hard = hard + (counts / counts.sum(dim=1, keepdim=True)).log()[:, asked.argmax(dim=1)].T
        counts = is_class.T @ p + 1 / classes
        soft = soft + asked @ (counts / counts.sum(dim=1, keepdim=True)).log().T
        counts = is_class.T @ p + prior[:, None]
        columns = columns + (asked @ (counts / counts.sum(dim=0)).T).log() - prior.log()
    found["posterior, hard predictions"] = hard
    found["posterior, expected log-likelihood"] = soft
    found["posterior, product of corrected probabilities"] = columns
    predicted = torch.stack([p.argmax(dim=1) for p in said_test])
    for name, doubts in (
        ("surest teacher, as it is", [torch.softmax(logits_test[n], 1).amax(1) for n in names]),
        ("surest teacher, calibrated", [p.amax(dim=1) for p in said_test]),
        ("teacher of the largest energy", [logits_test[n].logsumexp(dim=1) for n in names]),
    ):
        choice = torch.stack(doubts).argmax(dim=0)
        found[name] = F.one_hot(predicted.gather(0, choice[None])[0], classes)

    states, states_test = states_of(signals), states_of(words_test)
    x = features(logits, states, temperatures)
    scaler = StandardScaler().fit(x.numpy())
    plain = LogisticRegression(C=10 / len(truth), max_iter=200)
    plain.fit(scaler.transform(x.numpy()), truth)
    asked = scaler.transform(features(logits_test, states_test, temperatures).numpy())
    found["logistic regression, without the average as offset"] = torch.from_numpy(
        plain.decision_function(asked).reshape(len(asked), -1)
    )

    def gate(rows: torch.Tensor, there: dict[str, torch.Tensor]) -> torch.Tensor:
        """A gate fitted on some rows of validation."""
        some = {name: scores[rows] for name, scores in logits.items()}
        own = {name: fit_temperature(scores, known[rows]) for name, scores in some.items()}
        fitted = fit_gate(
            some,
            {name: state[rows] for name, state in there.items()},
            own,
            known[rows],
            folds_of(group_keys[rows], 0),
        )
        return fitted.logits(logits_test, states_test, own)

    everything = torch.arange(len(truth))
    shuffled = torch.randperm(len(truth), generator=torch.Generator().manual_seed(0))
    found["gate of logits and energies"] = gate(everything, {})
    for share in (2, 4, 8):
        some = shuffled[: len(truth) // share]
        found[f"gate, 1/{share} of validation ({len(some)})"] = gate(some, states)
    before = gates.COMPONENTS
    for count in (16, 64):
        gates.COMPONENTS = count
        found[f"gate, {count} components of the states"] = gate(everything, states)
    gates.COMPONENTS = before
    found["calibrated average"] = calibrated_average(logits_test, temperatures)
    if classes == 2:  # decision_function has one column then
        found.pop("logistic regression, without the average as offset")
    return {
        name: float((target.argmax(dim=1).numpy() == truth_test).mean())
        for name, target in found.items()
    }


def logits_of(signals: SignalSchema) -> dict[str, torch.Tensor]:
    return {name: outputs.logits.float() for name, outputs in signals.items()}
