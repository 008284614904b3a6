"""What the parts do. Imported when they run."""

from __future__ import annotations

from typing import Any

import torch

from ds_distill.data.tokenizer import load_tokenizer
from ds_distill.files import new_folder
from ds_distill.losses import Seen, Term
from ds_distill.losses.term import target_loss
from ds_distill.routing import Asked, Target
from ds_distill.routing.policies import mixed
from ds_distill.run.run import Run
from example_parts.settings import ReverseKL, Soup


class ReverseKLTerm(Term):
    """weight * T^2 * KL(softmax(z_s / T) || softmax(z_t / T)) per row."""

    kind = ReverseKL

    def forward(self, seen: Seen) -> torch.Tensor:
        temperature, weight = self.settings.temperature, self.weight

        def loss(own: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            p = torch.log_softmax(own.float() / temperature, dim=-1)
            q = torch.log_softmax(wanted.float() / temperature, dim=-1)
            return weight * temperature**2 * (p.exp() * (p - q)).sum(dim=-1)

        return target_loss(loss, seen.at(self.rows))


def confident(seen: Asked) -> Target:
    """Weights [T, n] that sum to 1 in each row."""
    logits = [teacher.logits.float() for teacher in seen.teachers.values()]
    largest = torch.stack([z.softmax(-1).amax(-1) for z in logits])
    weights = largest**seen.settings.power * seen.reported
    return mixed(seen, weights / weights.sum(dim=0).clamp(min=1e-12))


def soup(settings: Soup, number: int, name: str, run: Run) -> dict[str, Any]:
    """Average the models' weights and put the result where later phases find it."""
    if run.world.is_main:
        references = [run.reference(model, number) for model in settings.models]
        models = [run.model(reference) for reference in references]
        states = [model.state_dict() for model in models]
        mean = {
            key: torch.stack([state[key] for state in states]).mean(dim=0)
            if value.is_floating_point()
            else value
            for key, value in states[0].items()
        }
        models[0].load_state_dict(mean)
        with new_folder(run.folder.model(number, settings.save_as)) as folder:
            models[0].save_pretrained(folder)
            load_tokenizer(references[0].model, references[0].revision).save_pretrained(folder)
    run.world.barrier()
    return {"averaged": settings.models}
