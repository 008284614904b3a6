"""Profiles as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_distill.planning.gpus import GIB
from ds_distill.planning.units import duration
from ds_distill.profiling.models import ProfiledModel
from ds_distill.profiling.trainings import Profiled, parts_in_order
from ds_distill.tables import Table


def trainings_text(trainings: Sequence[Profiled], ranks: int) -> str:
    """Time, speed and memory of a step of each training, of rank 0."""
    return "\n\n".join(table.text() for table in _trainings(trainings, ranks)) + "\n"


def _trainings(trainings: Sequence[Profiled], ranks: int) -> Iterator[Table]:
    parts = parts_in_order(one.seconds for one in trainings)
    of = f"of rank 0 of {ranks}, " if ranks > 1 else ""
    yield Table(
        f"Milliseconds of a step, {of}means of {trainings[0].steps} steps",
        ["phase: model", *parts, "step", "quartiles"],
        [
            [
                f"{one.phase}: {one.model}",
                *(_milliseconds(one.seconds.get(part)) for part in parts),
                _milliseconds(one.step),
                "-".join(map(_milliseconds, one.quartiles)),
            ]
            for one in trainings
        ],
    )
    peaks = sorted({one.device_flops for one in trainings if one.device_flops is not None})
    of_device = " or ".join(f"{flops / 1e12:.3g} TFLOP/s" for flops in peaks)
    whose = "NVIDIA's data sheet" if any(one.peaks for one in trainings) else "measured here"
    notes = [f"Utilisation: of {of_device}, {whose}."] if peaks else []
    yield Table(
        "Speed, and operations of real tokens and of the head's rows",
        ["phase: model", "tokens/s", "GFLOP a step", "TFLOP/s", "utilisation", *_BESIDE, "GiB"],
        [_speed(one) for one in trainings],
        notes,
    )
    if any(one.peaks for one in trainings):
        parts = parts_in_order(one.peaks for one in trainings)
        yield Table(
            "GiB allocated at most, by part",
            ["phase: model", *parts],
            [
                [
                    f"{one.phase}: {one.model}",
                    *(_gib(one.peaks.get(part)) for part in parts),
                ]
                for one in trainings
            ],
        )


_BESIDE = ("validation", "checkpoint")


def _speed(one: Profiled) -> list[str]:
    flops = sum(one.flops.values())
    return [
        f"{one.phase}: {one.model}",
        f"{one.trained_tokens / one.step:,.0f}",
        f"{flops / 1e9:,.1f}",
        f"{flops / one.step / 1e12:,.3g}",
        "" if one.utilisation is None else f"{one.utilisation:.0%}",
        *(duration(one.beside[part]) if part in one.beside else "" for part in _BESIDE),
        _gib(max(one.peaks.values(), default=one.resident)),
    ]


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / GIB:.2f}"


def models_text(models: Sequence[ProfiledModel]) -> str:
    """Size, latency and throughput of finished models, and how many times the largest teacher's
    they are."""
    return "\n\n".join(table.text() for table in _models(models)) + "\n"


def _models(models: Sequence[ProfiledModel]) -> Iterator[Table]:
    largest = max(models, key=lambda model: model.parameters)
    yield Table(
        f"Size, against the largest, {largest.name}",
        ["model", "parameters", "file", "times smaller", models[0].metric or "score"],
        [
            [
                model.name,
                f"{model.parameters / 1e6:.1f} M",
                f"{model.file_bytes / 1e6:.1f} MB",
                f"{largest.parameters / model.parameters:.1f}",
                "" if model.score is None else f"{model.score:.3f}",
            ]
            for model in models
        ],
    )
    for number, case in enumerate(models[0].cases):
        on_gpu = ["GiB"] if case.peak is not None else []
        slowest = largest.cases[number].median
        yield Table(
            f"Batch of {case.batch}, {case.length} tokens each; milliseconds of a batch",
            ["model", "p50", "p90", "p99", "batches", "texts/s", "times faster", *on_gpu],
            [
                [
                    model.name,
                    *(_milliseconds(value) for value in model.cases[number].percentiles),
                    str(model.cases[number].repeats),
                    f"{model.cases[number].per_second:,.1f}",
                    f"{slowest / model.cases[number].median:.2f}",
                    *(_gib(model.cases[number].peak) for _ in on_gpu),
                ]
                for model in models
            ],
        )
