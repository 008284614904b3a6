"""From teachers' signals to a target, by a recipe's policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ds_distill.errors import did_you_mean
from ds_distill.recipe.policies import POLICIES, Routing, that_take_partial
from ds_distill.routing.fitting import STATES, Fitted, states_of
from ds_distill.routing.multi_label import FittedByLabel, by_label, load_fitted
from ds_distill.routing.partial_teachers import Classes, classes_of
from ds_distill.routing.policies import NOTHING, Asked, Policy
from ds_distill.seen import Target
from ds_distill.types import Batch, Signals


class Router:
    """A policy with what it needs: callable on a batch."""

    def __init__(
        self,
        routing: Routing | str | Mapping[str, Any],
        *,
        temperature: float = 1.0,
        seed: int = 0,
        fitted: Fitted | FittedByLabel | str | Path | None = None,
    ) -> None:
        """
        routing: a policy's name, e.g. "average", or the settings that a recipe has for it, e.g.
            {"policy": "expertise", "conflict": "best-expert"}.
        temperature: of the KL term; probabilities are mixed at it.
        seed: of the policies that choose at random.
        fitted: for the policies that read what an expertise phase has fitted: the file
            routing.safetensors of its run's folder, or what it holds.

        Raises ValueError when the policy is unknown, is `chosen` (the name of the best policy is
        in the run's routing.json), or needs `fitted` and has none; OSError when there is no such
        file.
        """
        routing = _settings(routing)
        if isinstance(fitted, str | Path):
            fitted = load_fitted(Path(fitted))
        if routing.needs.expertise and fitted is None:
            raise ValueError(
                f"the policy {routing.policy} reads what an expertise phase has fitted: give its "
                "run's routing.safetensors as `fitted`"
            )
        self._policy: Policy = routing.load()
        self._routing = routing
        self._temperature = temperature
        self._seed = seed
        self._fitted = fitted if routing.needs.expertise else None
        self._device = torch.device("cpu")
        self._checked = False

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose states it reads, of every teacher."""
        needs, fitted = self._routing.needs, self._fitted
        reads = needs.fitted_states and fitted is not None and fitted.reads_states
        return (STATES,) if reads else ()

    @torch.no_grad()
    def __call__(self, teachers: Mapping[str, Signals], batch: Batch) -> Target:
        """The target of each of the batch's n rows. Where an example has any number of labels, each
        label has a target of its own.

        teachers: by name, with logits [n, C], or [n, K] of a partial teacher.

        Raises ValueError when the policy needs labels, or teachers that the data name, and the
        batch was made without, when it does not take partial teachers and one is, or when `fitted`
        is of other teachers.
        """
        partial = classes_of(teachers)
        if partial and not self._routing.allows_partial():
            raise ValueError(
                f"teachers that know some of the classes ({', '.join(partial)}) cannot be routed "
                f"by {self._routing.policy}: take one of {', '.join(that_take_partial())}"
            )
        if self._routing.needs.labels and "labelled" not in batch.row_sets:
            raise ValueError(
                f"the policy {self._routing.policy} weighs the teachers by the labels, and the "
                "batch was made without labels: give labels, or take another policy"
            )
        if self._routing.needs.teacher_ids and batch.teacher_ids is None:
            raise ValueError(
                f"the policy {self._routing.policy} follows the teacher that the data name, and "
                "the batch names none: give `teacher_names`, or take another policy"
            )
        if self._fitted is not None and set(self._fitted.teachers) != set(teachers):
            raise ValueError(
                f"`fitted` is of the teachers {', '.join(self._fitted.teachers)}, and the "
                f"batch has {', '.join(teachers)}: fit the policy on the same teachers"
            )
        self._check_same_classes(partial)
        if self._fitted is not None and self._device != batch.labels.device:
            self._fitted, self._device = self._fitted.to(batch.labels.device), batch.labels.device
        return self._target(teachers, batch)

    def _check_same_classes(self, partial: Classes) -> None:
        """Once: reading the classes waits for the device."""
        if self._fitted is None or self._checked:
            return
        known = {name: classes.tolist() for name, classes in partial.items()}
        fitted = self._fitted.classes if isinstance(self._fitted, Fitted) else {}
        if known != fitted:
            raise ValueError(
                f"`fitted` is of teachers with the classes {fitted or 'of the task'}, and those of "
                f"the batch are {known or 'all'}: fit the policy on the same teachers"
            )
        self._checked = True

    def _target(self, teachers: Mapping[str, Signals], batch: Batch) -> Target:
        seen = Asked(
            NOTHING,
            batch,
            teachers,
            settings=self._routing,
            states=states_of(teachers) if self.layers else {},
            temperature=self._temperature,
            seed=self._seed,
        )
        if batch.labels.ndim > 1:
            assert not isinstance(self._fitted, Fitted), "fitted on examples with one label each"
            return by_label(self._policy, seen, self._fitted)
        assert not isinstance(self._fitted, FittedByLabel), "fitted by label"
        return self._policy(replace(seen, fitted=self._fitted))


def _settings(given: Routing | str | Mapping[str, Any]) -> Routing:
    """A routing's settings. Raises ValueError when there is no such policy."""
    if isinstance(given, str):
        given = {"policy": given}
    if isinstance(given, Mapping):
        name = given.get("policy")
        if name not in POLICIES:
            hint = did_you_mean(str(name), POLICIES) or f" Known: {', '.join(POLICIES)}."
            raise ValueError(f"there is no policy {name!r}.{hint}")
        given = POLICIES[name].model_validate(dict(given))
    if given.policy == "chosen":
        raise ValueError(
            "`chosen` stands for the policy that an expertise phase found best: give the name of "
            "that policy, `choice` in its run's routing.json"
        )
    return given
