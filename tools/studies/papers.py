"""The papers' small forms over seeds, for the tables of docs/studies.

    python tools/studies/papers.py --work FOLDER --data DIR [--tables ...] [--seeds 1 2 3]

Each run is `ds-distill run RECIPE --small` in a folder of its own. Start it again after a stop:
finished runs are read, the stopped one continues. When all runs of a table are done, it writes
docs/results/papers/TABLE.json, and what docs/studies shows of it. `--show` does that for the
documents alone, from the files that are there.

Intervals: of a difference within a seed, results.json has the paired bootstrap over the test
examples. Runs do not store predictions, so that of the mean over seeds is Student's t over the
seeds' differences: with three seeds 4.3 standard errors. The first is of the examples, the second
of the trainings; both are written.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from papers_figure import CURVES, draw, pooled
from papers_markdown import RESULTS, markdown, show
from papers_tables import TABLES, Table, Variant, overrides_of

from ds_distill.evaluation.bootstrap import mean_interval
from ds_distill.files import read_json, write_json
from ds_distill.recipe import builtin_recipes
from ds_distill.recipe.load import small_form
from ds_distill.run.inputs import describe_environment

MAJORITY = "majority class"
"""The baseline's name, beside the models'."""
OTHER_SIGN = "activation_boundary.other_sign"
"""What the training's record calls the share of neurons on the other side of zero."""


def run(table: Table, variant: Variant, seed: int, data: Path, folder: Path, dirty: bool) -> None:
    """Run a recipe's small form, and before it what makes its teacher."""
    overrides = [*overrides_of(table, variant), f"seed={seed}", f"data_folder={data}", "--small"]
    if variant.teacher:
        recipe = Path(__file__).with_name(variant.teacher)
        made = folder.parents[2] / recipe.stem
        run_recipe(str(recipe), [f"data_folder={data}"], made, dirty)
        [model] = (made / "models").iterdir()
        overrides.append(f"teachers.teacher.model={model}")
    run_recipe(table.recipe, overrides, folder, dirty)


def run_recipe(recipe: str, options: list[str], folder: Path, dirty: bool) -> None:
    """Run a recipe by the command line, or finish a run that was stopped."""
    if (folder / "results.json").is_file():
        return
    refuse_changes(describe_environment(1, "cpu"), dirty)
    command = [sys.executable, "-m", "ds_distill", "run", recipe, *options]
    resume = ["--resume"] if (folder / "recipe.yaml").is_file() else []
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([*command, "--folder", str(folder), *resume], check=True)


# ------------------------------------------------------------------------------ what came out


def collected(name: str, seeds: list[int], work: Path) -> dict[str, Any]:
    """The table of finished runs: what docs/results/papers/NAME.json holds."""
    table = TABLES[name]
    small = small_form(builtin_recipes()[table.recipe]).read_text(encoding="utf-8")
    folders = {
        label: [work / place(name, label, seed) for seed in seeds] for label in table.variants
    }
    return {
        "recipe": table.recipe,
        "small_form": yaml.safe_load(small),
        "seeds": seeds,
        "environment": environment([folder for of in folders.values() for folder in of]),
        "variants": {
            label: {
                "overrides": [*table.overrides, *table.variants[label].overrides],
                "more_phases": table.variants[label].more,
                **({"teacher": made} if (made := table.variants[label].teacher) else {}),
                **over_seeds([read_json(folder / "results.json") for folder in of]),
            }
            for label, of in folders.items()
        },
    }


def place(name: str, variant: str, seed: int) -> str:
    return f"{name}/{variant}/seed-{seed}"


def environment(folders: list[Path]) -> dict[str, Any]:
    """That of the runs, all of the same commit and versions.

    Raises SystemExit where they are not.
    """
    found = []
    for folder in folders:
        known = read_json(folder / "environment.json")
        phases, changed = known.pop("phases"), known.pop("changes", None)
        assert not changed, f"{folder} was resumed with another recipe"
        found += [known, *(start for starts in phases.values() for start in starts)]
    dates = sorted({one.pop("date") for one in found})
    if any(one != found[0] for one in found):
        raise SystemExit("the runs have different commits or versions: start with an empty --work")
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    return {"dates": [dates[0], dates[-1]], **found[0], "OMP_NUM_THREADS": threads}


def over_seeds(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Models, differences and seconds of one variant; lists have a value per seed."""
    evaluations = [one["phases"][-1] for one in results]
    first = evaluations[0]
    shown = [first["metric"], *(key for key in ("accuracy", "ece") if key in first["baseline"])]
    measured = [measures(one) for one in results]
    models = {
        model: {
            "role": first["models"][model]["role"],
            **{key: numbers([one["models"][model][key] for one in evaluations]) for key in shown},
            **{key: numbers([one[model][key] for one in measured]) for key in measured[0][model]},
            "reliability": pooled([one["models"][model]["reliability"] for one in evaluations]),
        }
        for model in first["models"]
    }
    baseline = {key: numbers([one["baseline"][key] for one in evaluations]) for key in shown}
    return {
        **{key: first[key] for key in ("split", "over", "metric", "metric_settings")},
        "examples": first["baseline"]["examples"],
        "models": {**models, MAJORITY: {"role": "baseline", **baseline}},
        "differences": differences(evaluations),
        "seconds": {
            phase["phase"]: [one["phases"][number]["seconds"] for one in results]
            for number, phase in enumerate(results[0]["phases"])
        },
    }


def measures(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By model: steps of its training, and the share of neurons on the other side at its end."""
    found: dict[str, dict[str, float]] = {model: {} for model in results["phases"][-1]["models"]}
    for phase in results["phases"]:
        for model in phase.get("trained", []):
            found[model["output"]] = {"steps": model["steps"]}
            if OTHER_SIGN in model.get("measures", {}):
                found[model["output"]]["other_sign"] = model["measures"][OTHER_SIGN]
    return found


def numbers(values: list[Any]) -> dict[str, Any]:
    """Values by seed, and their mean where all have one."""
    whole = None not in values
    return {"seeds": values, "mean": statistics.fmean(values) if whole else None}


def differences(evaluations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each student less each other model and the majority class."""
    rows = []
    for number, pair in enumerate(evaluations[0]["comparisons"]):
        each = [one["comparisons"][number] for one in evaluations]
        extra = {key: numbers([one[key] for one in each]) for key in SHARES if key in pair}
        rows.append({"student": pair["student"], "other": pair["other"], **paired(each), **extra})
    for model, report in evaluations[0]["models"].items():
        if report["role"] == "student":
            each = [one["models"][model]["to_baseline"] for one in evaluations]
            row = {"student": model, "other": MAJORITY, **paired(each)}
            if "confusion" in report:
                row["accuracy"] = paired([more_right(one, model) for one in evaluations])
            rows.append(row)
    return rows


SHARES = ("retention", "gap_closed")


def more_right(evaluation: dict[str, Any], model: str) -> dict[str, Any]:
    """A model's accuracy less the majority class's, with its 95% interval from the examples that
    one of them alone has right. F1 of a class can be high for an answer that never changes."""
    confusion = evaluation["models"][model]["confusion"]
    always = list(evaluation["baseline"]["per_class"]).index(evaluation["baseline"]["answer"])
    examples = sum(map(sum, confusion))
    model_alone = sum(row[at] for at, row in enumerate(confusion) if at != always)
    majority_alone = sum(confusion[always]) - confusion[always][always]
    share = (model_alone - majority_alone) / examples
    variance = ((model_alone + majority_alone) / examples - share**2) / examples
    reach = 1.96 * variance**0.5
    return {"difference": share, "interval": [share - reach, share + reach]}


def paired(each: list[dict[str, Any]]) -> dict[str, Any]:
    """A difference by seed with its bootstrap interval, its mean and the interval of that."""
    values = [one["difference"] for one in each]
    return {
        **numbers(values),
        "intervals": [one["interval"] for one in each],
        "t_interval": mean_interval(values),
    }


def is_drawn(name: str) -> bool:
    """Whether a table is there that compares models with and without a penalty on confidence."""
    file = RESULTS / f"{name}.json"
    variants = [variant for variant, _ in CURVES.values()]
    return file.is_file() and set(variants) <= set(read_json(file)["variants"])


def refuse_changes(environment: dict[str, Any], dirty: bool) -> None:
    """Raises SystemExit for a checkout that no commit holds, unless `dirty`."""
    commit = environment["commit"]
    if not dirty and (commit is None or commit.endswith("+changes")):
        raise SystemExit(f"commit {commit}: figures need one without changes; --dirty writes so")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, help="folder for runs")
    parser.add_argument("--data", type=Path, help="data_folder of the recipes")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--dirty", action="store_true", help="also from a changed checkout")
    parser.add_argument("--show", action="store_true", help="only write the pages")
    arguments = parser.parse_args()
    if arguments.show:
        show()
        penalised = [name for name in TABLES if is_drawn(name)]
        if penalised:
            draw(penalised)
        return
    if arguments.work is None or arguments.data is None:
        parser.error("--work and --data are needed")
    for seed in arguments.seeds:
        for name in arguments.tables:
            table = TABLES[name]
            for label, variant in table.variants.items():
                folder = arguments.work / place(name, label, seed)
                run(table, variant, seed, arguments.data, folder, arguments.dirty)
    for name in arguments.tables:
        found = collected(name, arguments.seeds, arguments.work)
        refuse_changes(found["environment"], arguments.dirty)
        RESULTS.mkdir(exist_ok=True)
        write_json(RESULTS / f"{name}.json", found)
        print(markdown(name, found))


if __name__ == "__main__":
    main()
