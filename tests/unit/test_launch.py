"""`ds-distill launch` without ranks: hostfiles and filters, options, orders, commands, messages."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ds_distill.cli import app
from ds_distill.errors import UserError
from ds_distill.launch import slurm
from ds_distill.launch.agent import AgentOrder
from ds_distill.launch.agent_processes import Ended
from ds_distill.launch.hosts import choose, count_ranks, read_hostfile
from ds_distill.launch.launch import Work, _conclude, _order, _prepare, _reason
from ds_distill.launch.lock_owner import free_of_ended
from ds_distill.launch.options import LaunchOptions
from ds_distill.launch.preflight import _doubles
from ds_distill.launch.probe import Answer, Question
from ds_distill.launch.process_group import shell_code
from ds_distill.launch.ssh import ssh_command
from ds_distill.process import lock
from ds_distill.process.failures import Failure, record_failure
from ds_distill.process.identity import ProcessId
from ds_distill.process.lock import FolderLock
from ds_distill.recipe import Recipe, load_recipe
from ds_distill.run.folder import PROBE, RunFolder

ROOT = Path(__file__).parents[2]

METACHARACTERS = "a b;c$(touch /tmp/x)`id`{1,2}*?'\"\\\n&|<>~#!%é"

HOSTS = {"one": [0, 1, 2], "two": [0, 1], "three": [0]}


def order(**changes) -> AgentOrder:
    standard = {
        "command": ["run", "my.yaml"],
        "hosts": HOSTS,
        "node_rank": 1,
        "master_addr": "one",
        "master_port": 20001,
        "directory": "/work",
        "grace": 20.0,
    }
    return AgentOrder(**{**standard, **changes})


# ----------------------------------------------------------------------------------- hosts


def test_hostfile(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# ours\none slots=3 # big\n\nme@two.example slots=2\n")
    assert read_hostfile(file) == {"one": [0, 1, 2], "me@two.example": [0, 1]}
    assert count_ranks(read_hostfile(file)) == 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a slots=1\nb slots=1\na slots=2\n", ["hosts:3", "a stands in line 1 already"]),
        ("a slots=0\n", ["hosts:1", "slots=0"]),
        ("-oProxyCommand=x slots=1\n", ["hosts:1", "host slots=N"]),
        ("a;b slots=1\n", ["hosts:1", "host slots=N"]),
        ("a 4\n", ["hosts:1", "host slots=N"]),
        ("a slots=²\n", ["hosts:1", "host slots=N"]),
        ("\n", ["names no host"]),
    ],
)
def test_a_wrong_hostfile_is_one_sentence(text, expected, tmp_path):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UserError) as error:
        read_hostfile(tmp_path / "hosts")
    assert all(part in str(error.value) for part in expected), error.value


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (None, None, HOSTS),
        ("two", None, {"two": [0, 1]}),
        ("two:1@one:2,0", None, {"one": [0, 2], "two": [1]}),
        ("one:0@one:1", None, {"one": [0, 1]}),
        (None, "one", {"two": [0, 1], "three": [0]}),
        (None, "one:1@three:0", {"one": [0, 2], "two": [0, 1]}),
    ],
)
def test_filters(include, exclude, expected):
    assert choose(HOSTS, include, exclude) == expected


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("me@one", None, {"me@one": [0, 1]}),
        ("three@me@two:1@me@one:0", None, {"me@one": [0], "me@two": [1], "three": [0]}),
        (None, "me@two:1@three", {"me@one": [0, 1], "me@two": [0]}),
    ],
)
def test_a_filter_names_a_host_with_its_user_as_the_hostfile_does(include, exclude, expected):
    """`me` was looked for alone, and what the message suggested failed too."""
    hosts = {"me@one": [0, 1], "me@two": [0, 1], "three": [0]}
    assert choose(hosts, include, exclude) == expected
    with pytest.raises(UserError, match=r"no host 'one'\. Did you mean `me@one`"):
        choose(hosts, "one", None)


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("one", "two", "either --include or --exclude"),
        ("on", None, "no host 'on'. Did you mean `one`?"),
        ("two:2", None, "two has no slot '2'; it has 0 to 1"),
        ("two:", None, "no slot ''"),
        (None, "one@two@three", "leaves no slot"),
    ],
)
def test_a_wrong_filter_is_one_sentence(include, exclude, expected):
    with pytest.raises(UserError, match=r"--(in|ex)clude") as error:
        choose(HOSTS, include, exclude)
    assert expected in str(error.value)


# --------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "either --num-gpus N"),
        ({"num_gpus": 2, "hostfile": Path("h")}, "either --num-gpus N"),
        ({"hostfile": Path("h"), "slurm": True}, "either --num-gpus N"),
        ({"num_gpus": 2, "include": "a"}, "--include needs --hostfile"),
        ({"num_gpus": 2, "ssh_port": 23}, "--ssh-port needs --hostfile"),
        ({"num_gpus": 2, "master_addr": "a"}, "--master-addr needs --hostfile or --slurm"),
        ({"num_gpus": 2, "no_ssh": True}, "--no-ssh needs --hostfile"),
        ({"hostfile": Path("h"), "node_rank": 0}, "--node-rank needs --no-ssh"),
        ({"hostfile": Path("h"), "no_ssh": True}, "give this host's number with --node-rank"),
        ({"hostfile": Path("h"), "nodes": 2}, "--nodes needs --slurm"),
        ({"num_gpus": 2, "submit": True}, "--submit needs --slurm"),
        ({"num_gpus": 2, "env": ["NOT_SET_HERE"]}, "--env NOT_SET_HERE: no such variable"),
        ({"hostfile": Path("no-hosts")}, "--hostfile no-hosts cannot be read"),
    ],
)
def test_options_that_do_not_go_together(options, expected):
    with pytest.raises(UserError) as error:
        LaunchOptions(**options).check()
    assert expected in str(error.value)


def test_a_port_in_use_is_told_before_ranks_start(tmp_path):
    """It was found by rank 0, and what was advised then was the same command."""
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--master-port {port}: .* in use.*leave it out"):
            LaunchOptions(num_gpus=2, master_port=port).check()
        several = LaunchOptions(hostfile=tmp_path / "hosts", no_ssh=True, master_port=port)
        with pytest.raises(UserError, match=r"Name another one, the same on all hosts\."):
            replace(several, node_rank=0).check()
        replace(several, node_rank=1).check()  # it is the first host's port
    LaunchOptions(num_gpus=2, master_port=port).check()


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from ds_distill.cli import main; main()"


def test_more_ranks_than_gpus_are_told_before_torch_is_there(tmp_path, monkeypatch):
    """It was told after all that reads a recipe, its data and torch was imported. The count is that
    of nvidia-smi, of which a stand-in lists two GPUs."""
    (tmp_path / "nvidia-smi").write_text(
        '#!/bin/sh\n[ "$1" = --list-gpus ] && printf "GPU 0: A (UUID: a)\\nGPU 1: A (UUID: b)\\n"\n'
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    sentence = "launch: 3 ranks, but this machine has {}. Give a smaller number, or set "
    for words in (["launch"], ["cache", "build"]):
        command = [sys.executable, "-c", WITHOUT_TORCH, *words, "quickstart", "--num-gpus", "3"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        told = f"ds-distill: {sentence.format('2 GPUs')}DS_ACCELERATOR=cpu for CPU ranks.\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", told)
    LaunchOptions(num_gpus=2).check()
    (tmp_path / "hosts").write_text("a slots=2\nb slots=3\n")
    of_file = LaunchOptions(hostfile=tmp_path / "hosts", no_ssh=True, node_rank=0)
    of_file.check()
    with pytest.raises(UserError) as error:
        replace(of_file, node_rank=1).check()
    assert sentence.format("2 GPUs") in str(error.value), "its ranks failed one by one"
    for seen in ("1", "0,-1,1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        with pytest.raises(UserError) as error:
            LaunchOptions(num_gpus=3).check()
        assert sentence.format(f"1 GPUs (CUDA_VISIBLE_DEVICES={seen})") in str(error.value)
    for hides_all in ("", "-1", "-1,0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hides_all)
        LaunchOptions(num_gpus=3).check()  # these are CPU ranks
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    LaunchOptions(num_gpus=3).check()


def test_both_commands_have_the_options():
    for command in (["launch"], ["cache", "build"]):
        text = CliRunner().invoke(app, [*command, "--help"], terminal_width=200).output
        for option in ("--num-gpus", "--hostfile", "--no-ssh", "--slurm", "--grace", "--small"):
            assert option in text, command


# ---------------------------------------------------------------------------------- orders


@given(st.lists(st.text()), st.text(st.characters(exclude_characters="\0")))
def test_an_order_arrives_as_it_was_given(command, secret):
    sent = order(command=command, environment={"TOKEN": secret})
    line = sent.to_line()
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert AgentOrder.from_line(line) == sent


def test_a_secret_is_in_no_message():
    assert "canary" not in repr(order(environment={"TOKEN": "canary"}))


def test_each_rank_knows_its_number_and_the_first_host(monkeypatch):
    sent = order(command=["run", "my.yaml", f"name={METACHARACTERS}"], environment={"TOKEN": "x"})
    ranks = sent.ranks()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [[rank.environment[name] for name in (*names, "TOKEN")] for rank in ranks] == [
        ["3", "0", "6", "2", "one", "20001", "x"],
        ["4", "1", "6", "2", "one", "20001", "x"],
    ]
    start = [sys.executable, "-u", "-P", "-m", "ds_distill"]
    assert all(rank.arguments == [*start, *sent.command] for rank in ranks)
    monkeypatch.setenv("SLURM_PROCID", "2")
    [rank] = order(node_rank=None).ranks()
    assert rank.environment["RANK"] == "5"


@pytest.mark.parametrize(
    ("slots", "seen", "expected"),
    [
        ([0, 1], "4,5", "4,5"),  # each rank takes one of these by its local rank
        ([0, 1], None, None),
        ([0, 2], None, "0,2"),
        ([0, 2], "4,5,6", "4,6"),
        ([1], "GPU-a,GPU-b", "GPU-b"),
    ],
)
def test_ranks_see_the_gpus_of_their_slots(slots, seen, expected, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    ranks = order(hosts={"here": slots}, node_rank=0).ranks()
    assert {rank.environment.get("CUDA_VISIBLE_DEVICES") for rank in ranks} == {expected}
    if seen is not None:  # given with --env, it counts, and not the agent's own
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,8,9")
        environment = {"CUDA_VISIBLE_DEVICES": seen}
        ranks = order(hosts={"here": slots}, node_rank=0, environment=environment).ranks()
        assert {rank.environment["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {expected}


def test_gloo_gets_the_interface_that_leads_to_the_first_host(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    [rank] = order(master_addr="127.0.0.1", node_rank=2).ranks()
    assert rank.environment["GLOO_SOCKET_IFNAME"] == "lo"
    [rank] = order(node_rank=2, environment={"GLOO_SOCKET_IFNAME": "ib0"}).ranks()
    assert rank.environment["GLOO_SOCKET_IFNAME"] == "ib0"


def test_ssh_gets_one_fixed_quoted_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/a b/$(x)/python")
    *before, last = ssh_command("me@host", "ds_distill.launch.agent", 2222)
    assert before[-2:] == ["--", "me@host"] and "BatchMode=yes" in before
    assert before[before.index("-p") + 1] == "2222"
    assert shlex.split(last) == [
        *("exec", "/a b/$(x)/python", "-P", "-m", "ds_distill.launch.agent")
    ]


# ------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (-9, "here: a rank or its agent was ended by SIGKILL, as the system does when memory"),
        (-11, "here: a rank or its agent was ended by SIGSEGV"),
        (1, "here: the exit code of its ranks is 1"),
        (255, "here: the exit code of its ranks is 255"),
        (200, "here: the exit code of its ranks is 200"),
    ],
)
def test_an_exit_code_is_explained(code, reason):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import os; os.kill(os.getpid(), {-code}) if {code} < 0 else os._exit({code})",
        ]
    )
    assert _reason(Ended("here", shell_code(done.returncode)), by_ssh=False).startswith(reason)


def test_a_lost_connection_is_explained():
    lost = _reason(Ended("two", 255), by_ssh=True)
    assert "two: the connection was lost (ssh's exit code is 255)" in lost


def conclude(folder, ended, monkeypatch, capfd, **ways):
    """The exit code and the message after a launch."""
    monkeypatch.setattr(sys, "argv", ["ds-distill", "launch", "my.yaml"])
    run = RunFolder(folder)
    work = Work(None, [], run, ["launch"], ["run"], False, ["--resume"], run.results)
    with pytest.raises(SystemExit) as stopped:
        _conclude(work, LaunchOptions(**(ways or {"num_gpus": 2})), ended)
    return stopped.value.code, capfd.readouterr().err


def test_the_first_failure_of_a_rank_is_the_reason(tmp_path, monkeypatch, capfd):
    failed = [Ended("two", 1), Ended("one", 143)]
    code, text = conclude(tmp_path, failed, monkeypatch, capfd)
    assert code == 1 and "two: the exit code of its ranks is 1" in text
    for rank, kind, message in ((1, "lost", "connection closed"), (3, "fault", "KeyError: 'x'")):
        record_failure(tmp_path, Failure(rank, "two", 5.0 + rank, kind, message))
    code, text = conclude(tmp_path, failed, monkeypatch, capfd)
    assert code == 1 and "the run stopped: rank 3 on two: KeyError: 'x'." in text
    assert "launch my.yaml" in text
    record_failure(tmp_path, Failure(0, "one", 2.0, "mistake", "no such split"))
    assert conclude(tmp_path, failed, monkeypatch, capfd) == (2, ""), "the rank has printed it"


def test_a_port_that_is_taken_meanwhile_is_followed_by_another_one(tmp_path, monkeypatch, capfd):
    """What was advised was another --master-port, and then the same command without one."""
    record_failure(tmp_path, Failure(0, "a", 1.0, "port", "cannot listen on port 7"))
    for ways, advice in (
        ({}, "The next start takes another port"),
        ({"hostfile": tmp_path / "hosts"}, "The next start takes another port"),
        ({"num_gpus": 2, "master_port": 7}, "Name another --master-port"),
        ({"hostfile": tmp_path / "hosts", "no_ssh": True}, "Name another --master-port"),
        ({"slurm": True}, "Name another --master-port"),
    ):
        code, text = conclude(tmp_path, [Ended("a", 1)], monkeypatch, capfd, **ways)
        assert code == 1
        assert f"rank 0 on a: cannot listen on port 7. {advice}. Nothing was written. " in text


def test_sentences_end_once_and_a_lost_connection_is_named(tmp_path, monkeypatch, capfd):
    ended = [Ended("node-b", 255), Ended("node-a", 75)]
    record_failure(tmp_path, Failure(0, "a", 1.0, "fault", "it hangs. Set timeout_minutes."))
    code, text = conclude(tmp_path, ended, monkeypatch, capfd)
    assert code == 1 and "Set timeout_minutes. Nothing was written" in text
    (tmp_path / "failures" / "rank-00000.json").unlink()
    record_failure(tmp_path, Failure(0, "a", 1.0, "stopped", "stopped"))
    code, text = conclude(tmp_path, ended, monkeypatch, capfd, hostfile=tmp_path / "hosts")
    assert code == 75 and "stopped, with a checkpoint: node-b: the connection was lost" in text


def test_a_machine_or_a_gpu_that_has_two_names_is_refused():
    hosts = {"one": [0, 1], "two": [0], "three": [1], "four": [0]}
    question = Question(hosts, None, "one", 1, ".", "nonce", [])
    machines = [("m", ["x", "y"]), ("n", ["z"]), ("o", ["v", "y"]), ("m", ["x"])]
    answers = {
        rank: Answer(rank, machine=machine, gpus=len(ids), gpu_ids=ids)
        for rank, (machine, ids) in enumerate(machines)
    }
    three, four = _doubles(question, list(hosts), answers)
    assert three.startswith("three: GPU 1 of three is GPU 1 of one, too.")
    assert four.startswith("four: is the same machine as one. Give each machine one name")


def test_hosts_are_examined_with_the_variables_that_their_ranks_get(
    toy_recipe, tmp_path, monkeypatch, capfd
):
    """Without them a host's GPUs were counted that `--env CUDA_VISIBLE_DEVICES` takes away. What
    lists processes on GPUs stands for them: it starts beside the count, with what that sees."""
    tools = tmp_path / "tools"
    tools.mkdir()
    # A session of its own, as sshd's: nothing of this process's environment is there.
    session = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    clean = shlex.join(["env", "-i", *(f"{name}={value}" for name, value in session.items())])
    scripts = {
        "ssh": f'for last; do :; done; exec {clean} sh -c "$last"',
        "nvidia-smi": 'echo "of $CUDA_VISIBLE_DEVICES"',
    }
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", session["PATH"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    (tmp_path / "hosts").write_text("here slots=2\n")
    options = LaunchOptions(hostfile=tmp_path / "hosts", env=["CUDA_VISIBLE_DEVICES"])
    run = RunFolder(tmp_path / "run")
    recipe = load_recipe(str(toy_recipe))
    work = Work(recipe, [], run, ["launch"], ["run"], False, ["--resume"], run.results)
    sent = _order(work, options, options.hosts_of_file(), "one")
    assert _prepare(work, options, sent).environment["DS_ACCELERATOR"] == "cpu"
    assert "Note: here: another process is on a GPU: of 5,7\n" in capfd.readouterr().out


@pytest.fixture
def locked(tmp_path):
    """A folder whose lock has a process of another host; and what that host answers."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"

    def lock_of(host: str, answer: str) -> Path:
        with FolderLock(tmp_path / "run"):
            held = (tmp_path / "run" / lock.NAME).read_text()
        fields = json.loads(held)
        fields["process"] |= {"host": host, "machine": "another"}
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / lock.NAME).write_text(json.dumps(fields))
        ssh.write_text(f"#!/bin/sh\n{answer}\n")
        ssh.chmod(0o755)
        return tmp_path / "run"

    return lock_of


@pytest.mark.parametrize(
    ("host", "answer", "expected"),
    [
        ("one", "echo Welcome; echo ds-distill owner: false", None),
        ("one", "echo ds-distill owner: true", "in use by process"),
        ("one", "echo ds-distill owner: null", "one could not be asked whether it runs: it was in"),
        ("one", "echo no route >&2; exit 255", "one could not be asked whether it runs: no route"),
        ("other", "touch asked", "other is none of the hosts of this launch, so it is not asked"),
    ],
)
def test_the_owners_host_is_asked(host, answer, expected, locked, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(lock, "WATCH_SECONDS", 0.1)
    monkeypatch.chdir(tmp_path)
    folder = locked(host, answer)
    if expected is None:
        free_of_ended(folder, HOSTS, None)
        assert not (folder / lock.NAME).exists()
        return
    with pytest.raises(UserError, match=expected):
        free_of_ended(folder, HOSTS, None)
    assert (folder / lock.NAME).exists() and not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("changes", "expected"), [({}, "true"), ({"born": 1}, "false"), ({"machine": "x"}, "null")]
)
def test_an_owner_is_known_on_its_own_host(changes, expected):
    process = asdict(ProcessId.of_this()) | changes
    command = [sys.executable, "-m", "ds_distill.launch.lock_owner"]
    done = subprocess.run(command, input=json.dumps(process), capture_output=True, text=True)
    assert done.stdout == f"ds-distill owner: {expected}\n", done.stderr


def test_a_question_that_was_killed_leaves_a_folder_that_can_be_used(tmp_path, toy_settings):
    (tmp_path / f"{PROBE}1234").touch()
    recipe = Recipe.model_validate(toy_settings)
    RunFolder(tmp_path).check_new_or_same(recipe, resume=False)
    (tmp_path / "other").touch()
    with pytest.raises(UserError, match="holds other"):
        RunFolder(tmp_path).check_new_or_same(recipe, resume=False)


# ------------------------------------------------------------------------------------ Slurm


def test_the_script_of_a_job(toy_recipe, tmp_path, monkeypatch):
    """Run by bash, with the words of each command written down."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    folder = tmp_path / "runs' $HOME"
    options = ["--slurm", "--nodes", "2", "--num-gpus", "4", "--sbatch", "time=4:00:00"]
    name = f"description={METACHARACTERS}".replace("\n", "")
    command = ["launch", str(toy_recipe), name, "seed=3", "--folder", str(folder), *options]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "#!/bin/bash"
    for option in ("nodes=2", "gpus-per-node=4", "ntasks-per-node=1", "time=4:00:00"):
        assert f"#SBATCH --{option}" in lines
    program = tmp_path / "program"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        "print(json.dumps(sys.argv[1:]))\nsys.exit(int(sys.stdin.read()))\n"
    )
    program.chmod(0o755)
    (tmp_path / "scontrol").write_text(
        "#!/bin/sh\n[ $1 = show ] && exec echo JobId=7 JobState=$STATE\necho scontrol $*\n"
    )
    (tmp_path / "scontrol").chmod(0o755)
    script = done.output.replace(shlex.quote(sys.executable), shlex.quote(str(program)))
    # A command in the background of a script has no standard input of its own.
    script = script.replace('"${resume[@]}" &', '"${resume[@]}" < "$CODE" &')

    def run(code: int, state: str = "RUNNING") -> subprocess.CompletedProcess[str]:
        (tmp_path / "code").write_text(str(code))
        given = {**os.environ, "CODE": str(tmp_path / "code"), "SLURM_JOB_ID": "7", "STATE": state}
        given["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
        return subprocess.run(["bash", "-c", script], env=given, capture_output=True, text=True)

    ended = run(0)
    assert ended.returncode == 0, ended.stderr
    words = json.loads(ended.stdout)
    assert words[:3] == ["-P", "-m", "ds_distill"]
    assert words[3:6] == ["launch", str(toy_recipe), name]
    assert words[-7:] == ["--folder", str(folder), "--slurm", *words[-4:]]
    assert words[-4:] == ["--num-gpus", "4", "--grace", "20"]
    folder.mkdir()
    (folder / "recipe.yaml").touch()
    ended = run(3)
    assert ended.returncode == 3
    assert json.loads(ended.stdout) == [*words, "--resume"]
    assert run(75).stdout.splitlines()[-1] == "scontrol requeue 7"
    cancelled = run(75, "COMPLETING")
    assert cancelled.returncode == 75 and "requeue" not in cancelled.stdout


JOB = (["launch", "my.yaml", "--num-gpus", "4"], None, 2, 4)
GPUS = "#SBATCH --gpus-per-node=4"


def test_a_job_of_cpu_ranks_asks_for_no_gpus(monkeypatch):
    """A cluster without GPUs refuses the option. The job's ranks are on CPUs wherever it starts."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    lines = slurm.job_script(*JOB, []).splitlines()
    assert GPUS in lines and "export DS_ACCELERATOR=cpu" not in lines
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    of_cpus = slurm.job_script(*JOB, []).splitlines()
    assert [line for line in lines if line not in of_cpus] == [GPUS]
    assert [line for line in of_cpus if line not in lines] == ["export DS_ACCELERATOR=cpu"]


@pytest.mark.parametrize("own", ["gres=gpu:a100:4", "gpus-per-node=4", "gpus=8"])
def test_gpus_that_the_user_asks_for_are_asked_for_once(own, monkeypatch):
    """Slurm takes several such options for conditions that all hold."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    script = slurm.job_script(*JOB, [own, "time=4:00:00"])
    asked = [line for line in script.splitlines() if line.startswith("#SBATCH --g")]
    assert asked == [f"#SBATCH --{own}"]


@pytest.mark.parametrize(
    ("listed", "options", "partition", "asked"),
    [
        ("echo '(null)'; echo 'gpu:a100:8(S:0-1)'", [], None, True),
        ("echo '(null)'", [], None, False),
        ('[ "$4" = --partition=fast ] && echo gpu:2', ["partition=slow", "partition=fast"], "", 1),
        ('[ "$4" = --partition=slow ] && echo license:1', ["partition=fast"], "slow", False),
        ('[ "$4" = --partition=slow ] && echo "(null)"', [], "slow", False),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", [], None, True),
        ("exit 0", [], None, True),  # no such partition: sbatch says so
    ],
)
def test_a_job_asks_for_gpus_where_slurm_has_them(
    listed, options, partition, asked, tmp_path, monkeypatch, capfd
):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("SBATCH_PARTITION", raising=False)
    if partition:
        monkeypatch.setenv("SBATCH_PARTITION", partition)
    (tmp_path / "sinfo").write_text(f"#!/bin/sh\n{listed}\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    script = slurm.job_script(*JOB, options)
    assert (GPUS in script.splitlines()) == asked
    assert "DS_ACCELERATOR" not in script, "the ranks take what a node has"
    assert ("the script asks for none" in capfd.readouterr().err) == (not asked)


def test_a_job_needs_its_gpus_and_can_be_refused(toy_recipe, tmp_path, monkeypatch):
    command = ["launch", str(toy_recipe), "--folder", str(tmp_path / "run"), "--slurm"]
    with pytest.raises(UserError, match="the GPUs of each node with --num-gpus"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    command += ["--num-gpus", "2", "--submit"]
    with pytest.raises(UserError, match="no sbatch here"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    (tools / "sbatch").write_text("#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    (tools / "sbatch").chmod(0o755)
    with pytest.raises(UserError, match="invalid partition"):
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_srun_starts_one_task_a_node(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    command = slurm.srun_command({"a": [0], "b": [0]}, "ds_distill.launch.agent")
    text = " ".join(command)
    assert text.startswith("srun --nodes 2 --ntasks 2 --ntasks-per-node=1 --kill-on-bad-exit=1")
    assert "--cpus-per-task 8" in text
