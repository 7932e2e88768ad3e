"""What is kept is used where nothing can be written."""

import dataclasses
import os
from pathlib import Path

import docker
import pytest

from tests.runtimes.containers import job_of, run, small_image
from toto_compat.model.artifacts import Artifacts
from toto_compat.runtimes.container_options import INPUT_FOLDER
from toto_compat.runtimes.source import CellSource

KEY = {"torch": "2.13.0", "mode": "default"}
IN_A_CONTAINER = f"""
import logging, os, sys
from pathlib import Path
from toto_compat.model.artifacts import Artifacts

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
artifacts = Artifacts(Path("{INPUT_FOLDER}/kept"), {KEY!r})
with artifacts.compiling():
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    print("found", (folder / "kernel.main.so").read_bytes())
    (folder / "new").write_bytes(b"")
"""


@pytest.mark.docker
def test_in_a_read_only_container_what_is_kept_is_used_and_it_says_that_nothing_was_written(
    client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    kept = tmp_path / "kept"
    with (artifacts := Artifacts(kept, KEY)).compiling():
        (Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "kernel.main.so").write_bytes(b"code")
    assert artifacts.key == KEY
    kept.chmod(0o755)  # the container's user is another one
    next(kept.iterdir()).chmod(0o644)
    folder = tmp_path / "folder"
    folder.mkdir()
    with small_image(client, tmp_path / "project") as image:
        job = job_of(image, folder, IN_A_CONTAINER)
        job = dataclasses.replace(job, source=CellSource().folder, inputs={kept: f"{INPUT_FOLDER}/kept"})
        end, lines = run(client, job)
    assert end.process.code == 0, lines
    assert [line.removeprefix(f"{INPUT_FOLDER}/kept: ") for line in lines] == [
        "1 compiled files are used",
        "found b'code'",
        "nothing was written: Read-only file system",
    ]
