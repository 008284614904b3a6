"""What `ds-distill launch` does, and `ds-distill cache build` on many ranks."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ds_distill.launch import slurm
from ds_distill.launch.agent import TERMINATED, AgentOrder
from ds_distill.launch.agent_processes import Agents, Ended, Start
from ds_distill.launch.hosts import Hosts, count_ranks
from ds_distill.launch.lock_owner import free_of_ended
from ds_distill.launch.options import LaunchOptions, check_gpus
from ds_distill.launch.preflight import Probe, examine, paths_in, shared_file
from ds_distill.launch.probe import Answer, Question, count_gpus
from ds_distill.launch.ssh import FAILED, SIGN_OF_LIFE_SECONDS, SILENCE_SECONDS, ssh_command
from ds_distill.process.failures import clear_failures, first_failure
from ds_distill.process.identity import LAUNCHED
from ds_distill.process.lock import free_after
from ds_distill.process.ports import PORTS, free_port
from ds_distill.process.signals import STOPPED, exit_on_signal, print_error
from ds_distill.recipe import Recipe
from ds_distill.run.folder import RunFolder

AGENT = "ds_distill.launch.agent"
PROBE = "ds_distill.launch.probe"


@dataclass(frozen=True)
class Work:
    """A run, or a cache build, that many ranks do."""

    recipe: Recipe
    given: list[str]
    """The recipe as the command line has it, with overrides and options."""
    folder: RunFolder
    command: list[str]
    """The words of `ds-distill` that start it: `launch`."""
    rank_command: list[str]
    """Those of each rank: `run`."""
    resume: bool
    resume_options: list[str]
    """What the command needs to continue after a stop."""
    result: Path
    """A file that exists when all went well."""


def launch_run(
    given: list[str],
    recipe: Recipe,
    folder: RunFolder,
    options: LaunchOptions,
    *,
    resume: bool,
    until: str | None = None,
) -> None:
    """Run a recipe on many ranks. Raises as `launch` does.

    given: the recipe as the command line has it, with overrides and options, `until` among them.
    until: the phase after which it ends.
    """
    ranks = ["run", *given, "--folder", str(folder.path), *(["--resume"] if resume else [])]
    result = folder.results
    if until is not None:
        result = folder.record(recipe.phase_names().index(until), until)
    launch(Work(recipe, given, folder, ["launch"], ranks, resume, ["--resume"], result), options)


def launch_build(
    given: list[str], recipe: Recipe, folder: RunFolder, options: LaunchOptions
) -> None:
    """Run a recipe's phases up to its last cache phase on many ranks; finished phases are skipped.
    Raises as `launch` does."""
    words = ["cache", "build"]
    ranks = [*words, *given, "--folder", str(folder.path)]
    [*_, (number, name)] = (
        (number, name)
        for number, (name, phase) in enumerate(recipe.named_phases())
        if phase.kind == "cache"
    )
    record = folder.record(number, name)
    launch(Work(recipe, given, folder, words, ranks, folder.holds_run(), [], record), options)


def launch(work: Work, options: LaunchOptions) -> None:
    """Check the run in this process, where an error is one paragraph, then start an agent on each
    host. A signal ends all that the agents have started.

    Raises UserError for mistakes, SystemExit(2) for those that a rank found and reported,
    SystemExit(75) when the ranks have saved their work on a signal, and SystemExit(1) when the run
    fails.
    """
    work.recipe.refuse_seeds("launch")
    if options.slurm and (options.submit or not slurm.in_job()):
        _write_job(work, options)
        return
    agents: Agents | None = None
    launched = uuid.uuid4().hex

    def free_folder() -> None:
        """From the lock of a rank 0 that was killed: no other host can tell that it has ended."""
        if agents is not None and agents.main_has_ended():
            with suppress(OSError):
                free_after(work.folder.path, launched)

    def end(at_once: bool) -> bool:
        saved = agents is not None and STOPPED in agents.stop(at_once)
        free_folder()
        return saved

    def message() -> str:
        return work.folder.how_to_continue(*work.resume_options)

    with exit_on_signal(message, end, work.folder.progress(work.recipe)):
        hosts = _hosts(options)
        if options.by_ssh:
            free_of_ended(work.folder.path, hosts, options.ssh_port)
        here = len([*hosts.values()][options.node_rank or 0])
        if options.by_ssh or options.slurm:
            here = 0
        if not options.node_rank:  # of several, the first one's launch checks for all
            _check(work, count_ranks(hosts), here)
        order = _order(work, options, hosts, launched)
        starts = _starts(options, order)
        if options.by_ssh or options.slurm:
            order = _prepare(work, options, order)
            starts = _starts(options, order)
        where = f" on {', '.join(hosts)}" if len(hosts) > 1 else ""
        print(f"Starting {count_ranks(hosts)} ranks{where} ...", flush=True)
        if here > (cores := len(os.sched_getaffinity(0))) and not count_gpus():
            print(f"Note: {here} ranks share {cores} cores: fewer are faster", flush=True)
        clear_failures(work.folder.path)
        agents = Agents(starts, options.grace)
        alive = SIGN_OF_LIFE_SECONDS if options.by_ssh else None
        ended = agents.run(alive, lambda one: _say_lost(one, options))
        free_folder()
        _conclude(work, options, ended)


def _hosts(options: LaunchOptions) -> Hosts:
    if options.hostfile is not None:
        return options.hosts_of_file()
    if options.slurm:
        return slurm.job_hosts(options.num_gpus)
    assert options.num_gpus is not None
    return {socket.gethostname(): list(range(options.num_gpus))}


def _check(work: Work, ranks: int, ranks_here: int) -> None:
    work.folder.check_new_or_same(work.recipe, work.resume)
    # Behind what can be told at once: these imports take many seconds.
    from ds_distill.check.recipe import check_data, check_recipe, open_sources

    gpus = count_gpus()
    check_gpus(ranks_here, gpus)
    check_recipe(work.recipe, num_ranks=ranks, on_gpu=gpus > 0)
    if not work.resume:
        check_data(work.recipe, open_sources(work.recipe))


def _order(work: Work, options: LaunchOptions, hosts: Hosts, launched: str) -> AgentOrder:
    """The order of the first host; of all, with Slurm.

    launched: a name of this launch that no other has.
    """
    if options.hostfile is None and not options.slurm:
        address, port = "127.0.0.1", options.known_port or free_port()
    else:
        address = options.master_addr or next(iter(hosts)).rpartition("@")[2]
        port = options.known_port or _port(options)
    # With `python -m` a random.py in the current folder would hide the library of that name.
    environment = {LAUNCHED: launched, "PYTHONSAFEPATH": "1", **options.variables()}
    if not options.by_ssh and not options.slurm and not count_gpus():
        environment["DS_ACCELERATOR"] = "cpu"
    return AgentOrder(
        command=work.rank_command,
        hosts=hosts,
        node_rank=None if options.slurm else options.node_rank or 0,
        master_addr=address,
        master_port=port,
        directory=os.getcwd(),
        grace=options.grace,
        silence=SILENCE_SECONDS if options.by_ssh else None,
        environment=environment,
    )


def _port(options: LaunchOptions) -> int:
    """A port on the first host. Each run needs its own: two may share a machine."""
    if options.slurm:
        return slurm.job_port()
    return random.SystemRandom().choice(PORTS)


def _starts(options: LaunchOptions, order: AgentOrder) -> list[Start]:
    if options.slurm:
        return [Start("srun", slurm.srun_command(order.hosts, AGENT), order)]
    if not options.by_ssh:
        return [Start(socket.gethostname(), [sys.executable, "-P", "-m", AGENT], order)]
    return [
        Start(host, ssh_command(host, AGENT, options.ssh_port), replace(order, node_rank=rank))
        for rank, host in enumerate(order.hosts)
    ]


def _prepare(work: Work, options: LaunchOptions, order: AgentOrder) -> AgentOrder:
    """Ask every host whether it can take part: the order with what they answered."""
    hosts = order.hosts
    if options.slurm:
        probes: list[Probe] = [(list(hosts), slurm.srun_command(hosts, PROBE), None)]
    else:
        probes = [
            ([host], ssh_command(host, PROBE, options.ssh_port), rank)
            for rank, host in enumerate(hosts)
        ]
    print(f"Asking {len(hosts)} hosts whether they can take part ...", flush=True)
    with shared_file(work.folder.path) as nonce:
        question = Question(
            hosts=hosts,
            node_rank=None,
            master_addr=order.master_addr,
            master_port=order.master_port,
            directory=order.directory,
            nonce=nonce,
            paths=sorted({*paths_in(work.recipe.model_dump(mode="json")), *paths_in(work.given)}),
            environment=order.environment,
        )
        answers = examine(probes, question)
    _report_busy(hosts, answers)
    on_cpu = not any(answer.gpus for answer in answers)
    more = {"DS_ACCELERATOR": "cpu"} if on_cpu else {}
    return replace(order, environment={**order.environment, **more})


def _report_busy(hosts: Hosts, answers: list[Answer]) -> None:
    for host, answer in zip(hosts, answers, strict=True):
        for process in answer.busy:
            print(f"Note: {host}: another process is on a GPU: {process}", flush=True)


def _say_lost(ended: Ended, options: LaunchOptions) -> None:
    """Say at once that a connection is lost: the other hosts' ranks have the grace to save."""
    if options.by_ssh and ended.code == FAILED:
        also = f"Ending the ranks on the other hosts, within {options.grace:g} seconds"
        print_error(f"{_reason(ended, by_ssh=True)}. {also}")


def _conclude(work: Work, options: LaunchOptions, ended: list[Ended]) -> None:
    """Return when the run is finished; otherwise raise SystemExit with its exit code."""
    failed = [one for one in ended if one.code != 0]
    if not failed and (options.node_rank or work.result.is_file()):
        return
    first = first_failure(work.folder.path)
    code = first.exit_code if first else failed[0].code if failed else 1
    if code == 2:
        raise SystemExit(2)  # a rank has reported it
    advice = work.folder.how_to_continue(*work.resume_options)
    by_ssh = options.by_ssh
    if code == STOPPED:
        lost = next((one for one in failed if by_ssh and one.code == FAILED), None)
        why = f", with a checkpoint: {_reason(lost, by_ssh)}" if lost is not None else ""
        print_error(f"stopped{why}. {advice}")
        raise SystemExit(STOPPED)
    reason = str(first or (_reason(failed[0], by_ssh) if failed else f"there is no {work.result}"))
    if first is not None and first.kind == "port":
        drawn = options.known_port is None and not options.slurm  # a job's port is always the same
        other = "The next start takes another port" if drawn else "Name another --master-port"
        advice = f"{other}. {advice}"
    print_error(f"the run stopped: {reason.rstrip('.')}. {advice}")
    raise SystemExit(1)


def _reason(ended: Ended, by_ssh: bool) -> str:
    """What the exit code of the first agent that failed means. by_ssh: it was started so."""
    if ended.code == FAILED and by_ssh:
        return (
            f"{ended.location}: the connection was lost (ssh's exit code is {FAILED}). What runs "
            f"there ends within {SILENCE_SECONDS:g} seconds and the grace"
        )
    if ended.code - 128 not in [*signal.Signals]:
        return f"{ended.location}: the exit code of its ranks is {ended.code}"
    name = signal.Signals(ended.code - 128).name
    memory = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    what = "its agent was stopped" if ended.code == TERMINATED else "a rank or its agent was ended"
    return f"{ended.location}: {what} by {name}{memory}"


def _write_job(work: Work, options: LaunchOptions) -> None:
    """Print the script of a Slurm job that runs this command on its nodes, or submit it."""
    _check(work, options.nodes * (options.num_gpus or 1), ranks_here=0)
    command = [*work.command, *work.given, "--folder", str(work.folder.path), "--slurm"]
    command += ["--num-gpus", str(options.num_gpus), "--grace", f"{options.grace:g}"]
    for option, value in (("addr", options.master_addr), ("port", options.master_port)):
        command += [f"--master-{option}", str(value)] if value is not None else []
    for name in options.env or ():
        command += ["--env", name]
    script = slurm.job_script(
        command,
        str(work.folder.path) if work.resume_options else None,
        options.nodes,
        options.num_gpus,
        options.sbatch or [],
    )
    if options.submit:
        slurm.submit(script)
    else:
        print(script, end="")
