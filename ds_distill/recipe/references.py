"""Where a recipe's references to models and data point to."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from ds_distill.errors import UserError, did_you_mean

DATA_FOLDER = "data:"
"""What the path of data in a recipe's `data_folder` begins with."""


_OTHERS = {
    "adapter_config.json": "is an adapter ({0}), as PEFT writes it, which changes the weights of "
    "another model. Merge the two (peft's merge_and_unload), and save what comes out.",
    "zero_to_fp32.py": "is a ZeRO checkpoint, whose weights lie in pieces. Put them together: "
    "python {0} {1} {1} --safe_serialization",
    "checkpoint-*": "has no model of its own, but checkpoints of transformers' Trainer inside. "
    "Name one of them, such as {0}",
    "pytorch_model*.bin": "has no safetensors, but pickled weights ({0}), which may run code and "
    "are not read. Load it with transformers, and call save_pretrained.",
}
"""What people have in place of a model: a file that tells it, and what helps: {0} is the file, {1}
the folder."""


def saved_otherwise(folder: Path) -> str | None:
    """What a folder holds in place of a model that transformers has saved, and what helps."""
    for pattern, what in _OTHERS.items():
        if found := sorted(folder.glob(pattern), key=lambda path: (len(path.name), path.name)):
            return what.format(found[-1], folder)
    return None


def resolve_model(reference: str, models_folder: str | None = None) -> str:
    """A local folder, or a hub id for transformers to fetch.

    `pkg:PACKAGE/FOLDER` is a folder inside an installed package, which is not imported.
    `models_folder` holds local copies of hub models.

    Raises UserError when a package or folder that is named is not there.
    """
    if reference.startswith("pkg:"):
        return str(_package_folder(reference))
    path = Path(reference).expanduser()
    if os.path.isdir(path):  # of a name that no file can have: False, where Path's raises
        if not (path / "config.json").is_file():
            what = saved_otherwise(path) or (
                "is a folder that has no config.json, so it is not a model saved by transformers. "
                "Give the folder that save_pretrained wrote."
            )
            raise UserError(f"model {reference!r} {what}")
        return str(path)
    looks_local = reference.startswith((".", "/", "~")) or reference.count("/") > 1
    if models_folder is not None and not looks_local:
        root = Path(models_folder).expanduser()
        for candidate in (root / reference, root / reference.rpartition("/")[2]):
            if os.path.isfile(candidate / "config.json"):
                return str(candidate)
        raise UserError(
            f"model {reference!r}: models_folder is {models_folder!r}, and neither "
            f"{root / reference} nor {root / reference.rpartition('/')[2]} holds a config.json. "
            "Put the model there, or leave models_folder out to fetch it from the hub."
        )
    if looks_local:
        raise UserError(f"model {reference!r}: there is no such folder. Check the path.")
    return reference


def resolve_data(path: str, data_folder: str | None = None, key: str = "task.data.path") -> str:
    """A path of data, with `data:NAME` as the folder or file NAME in `data_folder`. key: the
    recipe's, for messages.

    Raises UserError when there is no `data_folder`, or NAME is not in it.
    """
    if not path.startswith(DATA_FOLDER):
        return path
    name = path.removeprefix(DATA_FOLDER)
    if data_folder is None:
        raise UserError(
            f"this is the folder {name!r} in data_folder, which is not set. "
            "Set it to the folder that holds your data sets: data_folder=DIR.",
            at=f"{key}={path}",
        )
    root = Path(data_folder).expanduser()
    is_folder = os.path.isdir(root)
    there = sorted(item.name for item in root.iterdir()) if is_folder else []
    steps = Path(name).parts
    if steps and not Path(name).is_absolute() and ".." not in steps and os.path.exists(root / name):
        return str(root / name)
    shown = ", ".join(there[:20]) + (", ..." if len(there) > 20 else "")
    holds = f"it holds: {shown or 'nothing'}" if is_folder else "there is no such folder"
    raise UserError(
        f"not in data_folder={data_folder} ({holds}).{did_you_mean(name, there)} Put the data "
        "there, or choose another folder with data_folder=DIR.",
        at=f"{key}={path}",
    )


def predictions_file(teacher: str, path: str, data_folder: str | None) -> Path:
    """The file of a teacher's predictions. Raises as `resolve_data`."""
    resolved = resolve_data(path, data_folder, f"teachers.{teacher}.predictions")
    return Path(resolved).expanduser()


def _package_folder(reference: str) -> Path:
    package, _, folder = reference.removeprefix("pkg:").partition("/")
    try:
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
    except ValueError:  # of __main__
        spec = None
    if spec is None or spec.origin is None:
        raise UserError(
            f"model {reference!r}: the Python package {package!r} is not installed. "
            f"Install it: pip install {package.replace('_', '-')}"
        )
    path = Path(spec.origin).parent / folder
    if not (path / "config.json").is_file():
        raise UserError(f"model {reference!r}: {path} holds no config.json. Check the folder.")
    return path
