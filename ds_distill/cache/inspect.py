"""Describe caches to the user."""

from __future__ import annotations

from pathlib import Path

from ds_distill.cache.format import MANIFEST, Manifest
from ds_distill.errors import UserError


def caches_in(folder: Path) -> list[Path]:
    """The folder itself if it is a cache, else the caches of a run's folder. Raises UserError where
    there is none."""
    if (folder / MANIFEST).is_file():
        return [folder]
    found = sorted(file.parent for file in folder.glob(f"cache/*/{MANIFEST}"))
    if not found:
        raise UserError(
            f"{folder}: neither a finished cache nor a run's folder that holds one. Build one: "
            "ds-distill cache build RECIPE"
        )
    return found


def describe(cache: Path) -> str:
    """What a cache holds and how large it is, as text of several lines."""
    manifest = Manifest.read(cache)
    lines = [
        f"{cache}",
        f"  examples      {manifest.examples:,} (index {_size(cache / manifest.index.file)})",
    ]
    for name, teacher in manifest.teachers.items():
        schema, size = teacher.signals, sum(shard.bytes for shard in teacher.shards)
        stored = f"logits {schema.classes} x {schema.dtype}"
        if schema.codec is not None:
            settings = {k: v for k, v in schema.codec.items() if k not in ("codec", "tail")}
            stored = f"codec {schema.codec['codec']}, {settings}, temperature {schema.temperature}"
        stored += "".join(f", layer {layer} {width}" for layer, width in schema.hidden.items())
        stored += f", {schema.mask_variants} mask variants" if schema.mask_variants else ""
        lines += [
            f"  {name}",
            f"    stores      {stored}",
            f"    files       {len(teacher.shards)} shards, {size / 2**20:,.1f} MiB, "
            f"{size / max(manifest.examples, 1):,.1f} bytes per example",
            *([f"    not given   {teacher.not_given:,} examples"] if teacher.not_given else []),
            *(f"    {what:<11} {value}" for what, value in teacher.fingerprint.items()),
        ]
    return "\n".join(lines)


def _size(file: Path) -> str:
    return f"{file.stat().st_size / 2**20:,.1f} MiB"
