"""Whether the hub can be reached, asked once: its own client tries for half a minute per file."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit
from urllib.request import getproxies

from ds_distill.errors import UserError
from ds_distill.recipe.references import DATA_FOLDER, resolve_model
from ds_distill.recipe.schema import Recipe
from ds_distill.recipe.sources import source_of

SECONDS = 5.0


def models_and_data(recipe: Recipe) -> tuple[list[str], list[str]]:
    """What a recipe names: folders and hub ids of models, and paths of data."""
    models = [recipe.student.model, *recipe.encoders.values()]
    return models, [task.data.path for task in recipe.tasks_by_name.values()]


def reads_hub(models: Iterable[str], data: Iterable[str], models_folder: str | None = None) -> bool:
    """Whether a model or data are of the hub. models_folder: the recipe's."""
    for model in models:
        try:
            if not os.path.isdir(resolve_model(model, models_folder)):
                return True
        except UserError:  # reported with all other mistakes
            continue
    return any(source_of(path).name == "hub" for path in data if not path.startswith(DATA_FOLDER))


def go_offline_without_hub(
    models: Iterable[str], data: Iterable[str], models_folder: str | None = None
) -> str | None:
    """Set HF_HUB_OFFLINE where the hub is to be read and cannot be reached, so that what is in its
    local cache is used, and what is not is reported, at once. To be called before huggingface_hub
    is imported, by transformers or datasets too, which read the variable then. Behind a proxy
    nothing is asked. Arguments as of `reads_hub`.

    Returns a sentence for the user; None where nothing was changed.
    """
    if "HF_HUB_OFFLINE" in os.environ or getproxies():
        return None
    if not reads_hub(models, data, models_folder):
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
