"""`ds-distill push`: a finished run's student on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ds_distill.process.terminal import say


def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run's folder.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="NAME/MODEL on the hub.")],
    public: Annotated[
        bool, typer.Option("--public", help="A new repository is for all to see.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files, and push nothing.")
    ] = False,
) -> None:
    """Push a finished run to the hub: student, card, exported files, results.

    The repository is made where it is not there, private unless --public. The token is that of
    `hf auth login` or HF_TOKEN; it is written nowhere. Texts of examples stay here.
    """
    from ds_distill.export import hub

    hub.check_name(repo)
    uploads = hub.uploads_of(run)
    for one in uploads:
        say(f"{one.size / 1e6:10.3f} MB  {one.name}")
    if dry_run:
        say(f"Nothing was pushed. Without --dry-run these go to {repo}.")
        return
    url = hub.push(uploads, repo, public=public, message=f"ds-distill push {run.resolve().name}")
    say(f"Pushed to {url}")
