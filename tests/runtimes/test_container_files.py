"""A cell's files get into its container and out again, mounted or copied, and belong to who started it."""

import io
import os
import tarfile
from pathlib import Path

import docker
import pytest
from docker.models.containers import Container

from tests.reachable import let_everybody_in
from tests.runtimes.containers import identity, job_of, own_containers, run
from toto_compat.environments.engine import open_client
from toto_compat.errors import EnvironmentBuildError
from toto_compat.runtimes.cell_process import LOG_FILE
from toto_compat.runtimes.container_files import _pack, unpack
from toto_compat.runtimes.container_options import FIXED_UID, ContainerJob, invoking_identity
from toto_compat.runtimes.containers import Containers

pytestmark = pytest.mark.docker


@pytest.mark.skipif(os.geteuid() != 0, reason="taking on other users' numbers needs root")
@pytest.mark.parametrize("uid", [FIXED_UID, 1000, 1234])
def test_files_belong_to_the_invoking_user_afterwards(
    client: docker.DockerClient, image: str, cell: Path, uid: int
) -> None:
    script = "import os, pathlib; pathlib.Path('sub').mkdir(); pathlib.Path('sub/made').write_text(str(os.getuid()))"
    end, lines = run(client, job_of(image, cell, script, identity=identity(uid)))
    assert end.process.code == 0, lines
    assert (cell / "sub" / "made").read_text() == str(uid)
    assert {path.stat().st_uid for path in (cell, *cell.rglob("*"))} == {0}


@pytest.mark.skipif(os.geteuid() != 0, reason="taking on other users' numbers needs root")
@pytest.mark.parametrize("uid", [1000, 1234])
def test_a_user_who_is_not_root_runs_cells_as_himself(
    client: docker.DockerClient, image: str, tmp_path: Path, uid: int
) -> None:
    """The whole way as that user: his socket permission, his folder, his files."""
    let_everybody_in(tmp_path)
    cell = tmp_path / "cell"
    cell.mkdir()
    script = "import os, pathlib; pathlib.Path('made').write_text(str(os.getuid()))"
    job = job_of(image, cell, script)
    # once as root: what is imported on the way may lie where that user cannot read
    rehearsal = tmp_path / "rehearsal"
    rehearsal.mkdir()
    assert Containers(open_client()).run(job_of(image, rehearsal, script), lambda _: None).process.code == 0
    for path in (cell, *cell.rglob("*")):
        os.chown(path, uid, uid)
    socket_group = Path("/var/run/docker.sock").stat().st_gid
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([socket_group])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            assert invoking_identity().user == f"{uid}:{uid}"
            own = ContainerJob(**{**vars(job), "identity": invoking_identity()})
            code = Containers(open_client()).run(own, lambda _: None).process.code
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (cell / "made").read_text() == str(uid)
    assert (cell / "made").stat().st_uid == uid


def test_where_binds_cannot_work_files_are_copied_in_and_out(
    client: docker.DockerClient, image: str, cell: Path, tmp_path: Path
) -> None:
    given = tmp_path / "given.csv"
    given.write_text("from outside")
    (cell / "work").mkdir()
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "module.py").write_text("name = 'staged'")
    script = (
        "import os, pathlib, module\n"
        "given = pathlib.Path('/toto-compat/inputs/0/given.csv')\n"
        "try:\n    given.write_text('x'); writable = True\nexcept OSError:\n    writable = False\n"
        "pathlib.Path('work/answer').write_text(f'{given.read_text()} {module.name} {writable} {os.getuid()}')\n"
    )
    job = job_of(image, cell, script, inputs={given: "/toto-compat/inputs/0/given.csv"}, copy=True)
    end, lines = run(client, job)
    assert end.process.code == 0, lines
    uid = invoking_identity().uid
    assert (cell / "work" / "answer").read_text() == f"from outside staged False {uid}"
    assert (cell / "work" / "answer").stat().st_uid == os.geteuid()
    volumes = client.volumes.list(filters={"label": "toto-compat.runner"})
    assert not [one for one in volumes if f":{os.getpid()}:" in one.attrs["Labels"]["toto-compat.runner"]]


def test_a_folder_the_engine_does_not_see_is_an_error_not_an_empty_folder(
    client: docker.DockerClient, image: str, cell: Path
) -> None:
    job = job_of(image, cell, "", inputs={cell / "not-there": "/toto-compat/inputs/0/x"})
    with pytest.raises(EnvironmentBuildError, match="bind source path does not exist") as caught:
        Containers(client).run(job, lambda _: None)
    assert "TOTO_COMPAT_DOCKER_FILES=copy" in caught.value.hint
    assert own_containers(client) == []


def test_what_is_copied_in_holds_files_in_the_place_of_links(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("weights")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blob")
    packed = _pack(tmp_path / "snapshot", "inputs/0", (0, 0))
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        content = archive.extractfile("inputs/0/model.safetensors")
        assert content is not None
        assert content.read() == b"weights"
        assert archive.getmember("inputs/0/model.safetensors").isreg()


def test_only_files_and_folders_are_copied_out(client: docker.DockerClient, image: str, cell: Path) -> None:
    script = (
        "import os, pathlib\nos.symlink('/etc/passwd', 'link')\nos.symlink('/', 'root')\nos.mkfifo('pipe')\n"
        "pathlib.Path('sub').mkdir()\npathlib.Path('sub/file').write_text('left')\n"
    )
    end, lines = run(client, job_of(image, cell, script, copy=True))
    assert end.process.code == 0, lines
    assert (cell / "sub" / "file").read_text() == "left"
    assert {path.name for path in cell.iterdir()} == {"script.py", "sub", LOG_FILE}


def test_a_damaged_archive_is_told_and_no_traceback(
    client: docker.DockerClient, image: str, cell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Container, "get_archive", lambda *_: (iter([b"not a tar archive" * 100]), {}))
    with pytest.raises(EnvironmentBuildError, match="cannot be copied out"):
        run(client, job_of(image, cell, "", copy=True))
    assert own_containers(client) == []


def test_nothing_is_unpacked_beside_the_folder(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("cell/../../escaped"))
    buffer.seek(0)
    (tmp_path / "cell").mkdir()
    with pytest.raises(tarfile.TarError):
        unpack(buffer, tmp_path / "cell")
    assert list(tmp_path.iterdir()) == [tmp_path / "cell"]
