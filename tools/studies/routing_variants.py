"""What else was tried: targets that are no policy of the package, by their accuracy on test."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from ds_distill.routing import gate as gates
from ds_distill.routing.calibration import fit_temperature
from ds_distill.routing.fitting import folds_of, states_of
from ds_distill.routing.gate import calibrated_average, features, fit_gate
from ds_distill.types import Signals

TeacherSignals = Mapping[str, Signals]
Logits = Mapping[str, torch.Tensor]


def variants(
    signals: TeacherSignals,
    truth: np.ndarray,
    group_keys: torch.Tensor,
    signals_test: TeacherSignals,
    truth_test: np.ndarray,
) -> dict[str, float]:
    """Fitted on the routing split, right on test. group_keys: int64 [N, 2], see `Examples`."""
    known = torch.from_numpy(truth).long()
    logits, logits_test = logits_of(signals), logits_of(signals_test)
    temperatures = {name: fit_temperature(logits[name], known) for name in sorted(signals)}
    found = from_probabilities(logits, logits_test, temperatures, known)
    count = logits_test[min(signals)].shape[1]
    if count > 2:  # decision_function has one column with 2 classes
        found["logistic regression, without the average as offset"] = regression(
            signals, signals_test, temperatures, truth
        )
    found |= gates_of(signals, signals_test, group_keys, known)
    found["calibrated average"] = calibrated_average(logits_test, temperatures, {}, count)
    return {
        name: float((target.argmax(dim=1).numpy() == truth_test).mean())
        for name, target in found.items()
    }


def from_probabilities(
    logits: Logits, logits_test: Logits, temperatures: Mapping[str, float], known: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Targets [N, C] on test, of the teachers' probabilities and confusions alone."""
    names = list(temperatures)
    classes = logits[names[0]].shape[1]

    def probabilities(scores: Logits) -> list[torch.Tensor]:
        return [torch.softmax(scores[name].double() / temperatures[name], dim=1) for name in names]

    outputs, outputs_test = probabilities(logits), probabilities(logits_test)
    is_class = F.one_hot(known, classes).double()
    prior = (is_class.sum(dim=0) + 1) / (len(known) + classes)
    found: dict[str, torch.Tensor] = {
        "average of probabilities": sum(
            (torch.softmax(scores, dim=1) for scores in logits_test.values()), torch.zeros(())
        ),
        "product of calibrated probabilities": sum(
            (p.log() for p in outputs_test), torch.zeros(())
        ),
    }
    hard, soft, columns = prior.log(), prior.log(), prior.log()
    for p, on_test in zip(outputs, outputs_test, strict=True):
        counts = is_class.T @ F.one_hot(p.argmax(dim=1), classes).double() + 1 / classes
        hard = hard + (counts / counts.sum(dim=1, keepdim=True)).log()[:, on_test.argmax(dim=1)].T
        counts = is_class.T @ p + 1 / classes
        soft = soft + on_test @ (counts / counts.sum(dim=1, keepdim=True)).log().T
        counts = is_class.T @ p + prior[:, None]
        columns = columns + (on_test @ (counts / counts.sum(dim=0)).T).log() - prior.log()
    found["posterior, hard predictions"] = hard
    found["posterior, expected log-likelihood"] = soft
    found["posterior, product of corrected probabilities"] = columns
    predicted = torch.stack([p.argmax(dim=1) for p in outputs_test])
    for name, doubts in (
        ("surest teacher, as it is", [torch.softmax(logits_test[n], 1).amax(1) for n in names]),
        ("surest teacher, calibrated", [p.amax(dim=1) for p in outputs_test]),
        ("teacher of the largest energy", [logits_test[n].logsumexp(dim=1) for n in names]),
    ):
        choice = torch.stack(doubts).argmax(dim=0)
        found[name] = F.one_hot(predicted.gather(0, choice[None])[0], classes)
    return found


def regression(
    signals: TeacherSignals,
    signals_test: TeacherSignals,
    temperatures: Mapping[str, float],
    truth: np.ndarray,
) -> torch.Tensor:
    """Logistic regression on the gate's features: scores [N, C] on test."""
    x = features(logits_of(signals), states_of(signals), temperatures)
    scaler = StandardScaler().fit(x.numpy())
    plain = LogisticRegression(C=10 / len(truth), max_iter=200)
    plain.fit(scaler.transform(x.numpy()), truth)
    test = features(logits_of(signals_test), states_of(signals_test), temperatures)
    scores = plain.decision_function(scaler.transform(test.numpy()))
    return torch.from_numpy(scores)


def gates_of(
    signals: TeacherSignals,
    signals_test: TeacherSignals,
    group_keys: torch.Tensor,
    known: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Gates with less to learn from, or of other inputs: logits [N, C] on test."""
    logits, states = logits_of(signals), states_of(signals)
    logits_test, states_test = logits_of(signals_test), states_of(signals_test)

    def gate(rows: torch.Tensor, there: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """A gate fitted on some rows of validation."""
        some = {name: scores[rows] for name, scores in logits.items()}
        own = {name: fit_temperature(scores, known[rows]) for name, scores in some.items()}
        fitted = fit_gate(
            some,
            {name: state[rows] for name, state in there.items()},
            own,
            known[rows],
            folds_of(group_keys[rows], 0),
            {},
            logits[min(logits)].shape[1],
        )
        return fitted.logits(logits_test, states_test, own, {})

    everything = torch.arange(len(known))
    shuffled = torch.randperm(len(known), generator=torch.Generator().manual_seed(0))
    found = {"gate of logits and energies": gate(everything, {})}
    for share in (2, 4, 8):
        some = shuffled[: len(known) // share]
        found[f"gate, 1/{share} of validation ({len(some)})"] = gate(some, states)
    before = gates.COMPONENTS
    for count in (16, 64):
        gates.COMPONENTS = count
        found[f"gate, {count} components of the states"] = gate(everything, states)
    gates.COMPONENTS = before
    return found


def logits_of(signals: TeacherSignals) -> dict[str, torch.Tensor]:
    return {name: outputs.logits.float() for name, outputs in signals.items()}
