"""Whether the hub can be reached, asked once: its own client tries for half a minute per file."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

from ds_distill.errors import UserError
from ds_distill.parts.sources import source_of
from ds_distill.recipe.references import DATA_FOLDER, resolve_model
from ds_distill.recipe.schema import Recipe

SECONDS = 5.0


def reads_hub(recipe: Recipe) -> bool:
    """Whether a recipe names a model or data of the hub."""
    models = [recipe.student.model, *(teacher.model for teacher in recipe.teachers.values())]
    for model in models:
        try:
            if not os.path.isdir(resolve_model(model, recipe.models_folder)):
                return True
        except UserError:  # reported with all other mistakes
            continue
    paths = [task.data.path for task in recipe.tasks_by_name.values()]
    return any(source_of(path).name == "hub" for path in paths if not path.startswith(DATA_FOLDER))


def go_offline_without_hub(recipe: Recipe) -> str | None:
    """Set HF_HUB_OFFLINE where a recipe reads the hub and it cannot be reached, so that what is in
    its local cache is used, and what is not is reported, at once. To be called before
    huggingface_hub is imported, which reads the variable then. Behind a proxy nothing is asked.

    Returns a sentence for the user; None where nothing was changed.
    """
    if "HF_HUB_OFFLINE" in os.environ or getproxies() or not reads_hub(recipe):
        return None
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=SECONDS).close()
    except OSError as error:
        os.environ["HF_HUB_OFFLINE"] = "1"
        reason = error.strerror or str(error)
        return (
            f"Note: {endpoint.hostname} cannot be reached ({reason}); of models and data of the "
            "hub only local copies are used."
        )
    return None
