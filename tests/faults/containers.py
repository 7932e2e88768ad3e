"""Faults of runs whose cells are containers: runner or container killed, a log that breaks off, an engine that dies."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
import docker.errors

from tests.environments.small_project import REPOSITORY, why_no_engine
from tests.faults.kills import CELL_NOT_RUN, how
from tests.faults.outcome import ENDED_BEFORE, Campaign, Outcome, named
from tests.faults.storage import joined
from tests.faults.trial import Damage, Runner, Trial, promises, resumed
from tests.runtimes import stub_cell
from tests.runtimes.containers import job_of, small_image
from tests.runtimes.test_containers import CuttableSocket, until
from toto_compat.environments.engine import open_client
from toto_compat.environments.leftovers import RUNNER_LABEL, runner_lives
from toto_compat.runtimes.containers import Containers

SOCKET = Path("/var/run/docker.sock")
STATE = Path(os.environ.get("TOTO_COMPAT_ENGINE_STATE", "/var/lib/toto-compat-engine"))  # of docker/engine.sh


@contextmanager
def _engine(campaign: Campaign) -> Iterator[tuple[docker.DockerClient, dict[str, str]] | str]:
    """Give an engine and what a trial needs to run cells there, or why there is none."""
    why = why_no_engine()
    if why:
        yield why
        return
    client = open_client()
    with tempfile.TemporaryDirectory(dir=campaign.folder) as folder:
        source = Path(folder, "source")
        source.mkdir()
        shutil.copyfile(stub_cell.__file__, source / "stub_cell.py")
        for path in (campaign.folder, Path(folder), source):
            path.chmod(0o755)
        with small_image(client, Path(folder)) as image:
            yield client, {"image": image, "source": str(source), "behaviour": "measure"}
    client.close()


def _abandoned(client: docker.DockerClient) -> list[str]:
    """Name containers and volumes whose runner no longer lives: those of a campaign are all of them."""
    listed = client.containers.list(all=True, filters={"label": RUNNER_LABEL}, ignore_removed=True)
    left = [f"container {one.name}" for one in listed if not runner_lives(one.labels[RUNNER_LABEL])]
    volumes = [one for one in client.volumes.list(filters={"label": RUNNER_LABEL}) if one.attrs.get("Labels")]
    return left + [f"volume {one.name}" for one in volumes if not runner_lives(one.attrs["Labels"][RUNNER_LABEL])]


def _also_left(damage: Damage, client: docker.DockerClient) -> Damage:
    return Damage(damage.lost, (*damage.left, *_abandoned(client)), damage.broken)


def runner_killed(campaign: Campaign) -> Iterator[Outcome]:
    """Kill the runner before a call that changes a file: its containers end with it, and the next run removes them."""
    with _engine(campaign) as engine:
        if isinstance(engine, str):
            yield Outcome("", "", not_run=engine)
            return
        client, containers = engine
        drawn = campaign.moments_of("runner in containers", containers=containers)
        for number in drawn[:: max(1, campaign.moments // 5)]:
            with campaign.trial(containers=containers) as trial:
                hit = trial.start(fault={"FAULT_AT": str(number), "FAULT_KIND": "stop"})
                moment = f"{number}: {named(campaign.calls(containers)[number - 1])}"
                if not hit.until_halted():
                    hit.wait()
                    yield Outcome(moment, "", not_run=ENDED_BEFORE)
                    continue
                hit.kill()
                hit.wait()
                had = len(trial.kept())
                yield Outcome(moment, f"killed, {had} cells kept, resumed", _also_left(resumed(trial), client))


def container_killed(campaign: Campaign) -> Iterator[Outcome]:
    """Kill the container of a cell that runs: an error of that cell, the others go on."""
    with _engine(campaign) as engine:
        if isinstance(engine, str):
            yield Outcome("", "", not_run=engine)
            return
        client, containers = engine
        for turn in range(max(1, campaign.moments // 5)):
            cache = ("list_index", "upstream", "compile_friendly")[turn % 3]
            hanging = {**containers, "behaviour": f'{{"{cache}": "hang"}}'}
            with campaign.trial(containers=hanging) as trial:
                hit = trial.start()
                for _ in range(2):  # both modes of that cache
                    _kill_next(client, hit, cache)
                ended = hit.wait()
                broken, had = promises(ended, CELL_NOT_RUN), len(trial.kept())
                trial.containers = containers
                trial.give_orders()
                damage = _also_left(joined(broken, resumed(trial)), client)
                yield Outcome(f"two of {cache}", f"{how(ended)}, {had} cells kept, resumed", damage)


def _kill_next(client: docker.DockerClient, runner: Runner, cache: str) -> None:
    killed: list[str] = []

    def one_is_killed() -> bool:
        for container in client.containers.list(filters={"label": RUNNER_LABEL}, ignore_removed=True):
            own = f":{runner.process.pid}:" in container.labels[RUNNER_LABEL]
            hangs = f"/{cache}/" in container.labels.get("toto-compat.cell", "")
            if own and hangs and b"child" in container.logs():
                try:
                    container.kill()
                except docker.errors.APIError:
                    continue
                killed.append(str(container.id))
        return bool(killed) or runner.process.poll() is not None

    until(one_is_killed)


def log_breaks_off(campaign: Campaign) -> Iterator[Outcome]:
    """Cut the stream of a container's log while it prints: it is asked for again, and no line is lost or doubled."""
    with _engine(campaign) as engine:
        if isinstance(engine, str):
            yield Outcome("", "", not_run=engine)
            return
        _, containers = engine
        script = (
            "import pathlib, time\nfor n in range(50): print('line', n, flush=True)\n"
            "while not pathlib.Path('go').exists(): time.sleep(0.02)\n"
            "for n in range(50, 100): print('line', n, flush=True)\n"
        )
        with tempfile.TemporaryDirectory(dir=campaign.folder) as name:
            folder = Path(name, "cell")
            folder.mkdir()
            with CuttableSocket(SOCKET, Path(name, "cut.sock")) as cuttable:
                client = docker.DockerClient(base_url=f"unix://{cuttable.path}", timeout=30)

                def cut(line: str) -> None:
                    if line == "line 30":
                        cuttable.drop(cuttable.connections(b"/logs"))
                        (folder / "go").touch()

                Containers(client).run(job_of(containers["image"], folder, script), cut)
                client.close()
            lines = (folder / "cell.log").read_text(encoding="utf-8").splitlines()
        wanted = [f"line {number}" for number in range(100)]
        broken = () if lines == wanted else (f"{len(lines)} lines instead of 100: {lines[-3:]}",)
        yield Outcome("line 30 of 100", "asked for again, every line is there once", Damage(broken=broken))


def engine_killed(campaign: Campaign) -> Iterator[Outcome]:
    """Kill dockerd at seeded moments. Only where that was asked for: others may use the same engine."""
    if os.environ.get("FAULTS_ENGINE") != "1":
        yield Outcome("", "", not_run="it would end everybody's containers: FAULTS_ENGINE=1 allows it")
        return
    if not (STATE / "dockerd.pid").exists():
        yield Outcome("", "", not_run="docker/engine.sh did not start the engine that is there")
        return
    with _engine(campaign) as engine:
        if isinstance(engine, str):
            yield Outcome("", "", not_run=engine)
            return
        client, containers = engine
        for number in campaign.moments_of("engine", containers=containers):
            with campaign.trial(containers=containers) as trial:
                moment = f"{number}: {named(campaign.calls(containers)[number - 1])}"
                yield _without_engine(trial, client, number, moment)


def _without_engine(trial: Trial, client: docker.DockerClient, number: int, moment: str) -> Outcome:
    hit = trial.start(fault={"FAULT_AT": str(number), "FAULT_KIND": "stop"})
    halted = hit.until_halted()
    if halted:
        os.kill(int((STATE / "dockerd.pid").read_text()), signal.SIGKILL)
        hit.go_on()
        ended = hit.wait()
        subprocess.run([str(REPOSITORY / "docker" / "engine.sh"), "start"], check=True, capture_output=True)
    else:
        hit.wait()
        return Outcome(moment, "", not_run=ENDED_BEFORE)
    broken, had = promises(ended, 0, CELL_NOT_RUN, 12), len(trial.kept())
    until(lambda: bool(client.ping()))
    damage = _also_left(joined(broken, resumed(trial)), client)
    return Outcome(moment, f"{how(ended)}, {had} cells kept, resumed", damage)
