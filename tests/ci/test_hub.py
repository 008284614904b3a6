"""The hub is asked once whether it can be reached, and only where a recipe needs it."""

import json

from processes import python
from runs import written

COMMANDS = """
import json, os, sys
from ds_distill.cli import main

for command in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:
        sys.argv = ["ds-distill", *command]
        try:
            main()
        except SystemExit:
            pass
        import huggingface_hub.constants
        print(command[0], huggingface_hub.constants.HF_HUB_OFFLINE, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_commands_are_offline_before_the_hubs_client_is_there(
    tmp_path, toy_settings, command_environment
):
    """Where nothing answers. Each fails by the model that is nowhere, at once."""
    student = {"model": "no-one/no-model"}
    written({**toy_settings, "student": student}, tmp_path, "toy")
    written(toy_settings, tmp_path, "local")
    commands = [
        ["evaluate", student["model"], "local.yaml"],
        ["sweep", "local.yaml", "seed=1,2", f"student.model={student['model']}"],
        ["run", "toy.yaml"],
    ]
    asked = {**command_environment, "HF_ENDPOINT": "http://127.0.0.1:1"}
    del asked["HF_HUB_OFFLINE"]
    done = python(COMMANDS, json.dumps(commands), env=asked, cwd=tmp_path)
    states = [line.split() for line in done.stdout.splitlines() if line.endswith(("True", "False"))]
    assert states == [[command[0], "True"] for command in commands], done.stderr
    assert done.stderr.count("127.0.0.1 cannot be reached") == len(commands), done.stderr
