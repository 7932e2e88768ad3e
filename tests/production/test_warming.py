"""Warming in torch's own environment: refused before anything is compiled, or counted in two processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from toto_compat.production.warming import Refused, WarmRequest, WarmResult, built_by_a_compiler, main

pytestmark = pytest.mark.cell


def answer_to(request: WarmRequest, folder: Path) -> str:
    asked, output = folder / "asked.json", folder / "output.json"
    asked.write_text(request.model_dump_json(), encoding="utf-8")
    main(asked, output)
    return output.read_text(encoding="utf-8")


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    refused = Refused.model_validate_json(answer_to(WarmRequest(cache_dir=str(shared)), tmp_path))
    assert f"others can write to the folder {shared}" in refused.message
    assert not list(shared.iterdir())


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = Refused.model_validate_json(answer_to(WarmRequest(cache_dir=str(tmp_path / "file" / "kept")), tmp_path))
    assert str(tmp_path / "file") in refused.message


def test_what_builds_counts_and_what_asks_for_a_version_does_not(tmp_path: Path) -> None:
    (tmp_path / "empty.cpp").touch()
    with built_by_a_compiler() as built:
        subprocess.run(["g++", "--version"], check=True, capture_output=True)
        subprocess.run(["g++", "-c", str(tmp_path / "empty.cpp"), "-o", str(tmp_path / "empty.o")], check=True)
    subprocess.run(["g++", "-c", str(tmp_path / "empty.cpp"), "-o", str(tmp_path / "empty.o")], check=True)
    assert [line.split()[:2] for line in built] == [["g++", "-c"]]


def test_a_second_process_finds_all_that_the_first_one_compiled(tmp_path: Path) -> None:
    asked, results = tmp_path / "asked.json", []
    request = WarmRequest(
        cache_dir=str(tmp_path / "kept"), model="tiny", mode="default", max_context=64, max_horizon=8, samples=4
    )
    asked.write_text(request.model_dump_json(), encoding="utf-8")
    for name in ("first", "second"):
        output = tmp_path / f"{name}.json"
        command = [sys.executable, "-m", "toto_compat.production.warming", str(asked), str(output)]
        subprocess.run(command, check=True, capture_output=True)
        results.append(WarmResult.model_validate(json.loads(output.read_text(encoding="utf-8"))))
    first, second = results
    assert first.graphs_compiled >= 2  # a pass and draws
    assert first.compiler_calls > first.graphs_compiled
    assert (second.graphs_compiled, second.compiler_calls, second.not_written) == (0, 0, "")
    assert second.graphs_found == first.graphs_compiled
    assert (second.file, second.file_bytes, second.kept_files) == (first.file, first.file_bytes, first.kept_files)
