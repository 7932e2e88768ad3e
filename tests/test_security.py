"""The threats of SECURITY.md that no other file tests, and that every test it names is there."""

import ast
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.matrix.test_checkpoint import weights
from tests.runtimes.stub_cell import ESCAPES
from tests.runtimes.stub_runtime import MATRIX_TEXT, StubRuntime
from tests.terminal import seen_on_a_terminal
from tests.verdict.sample_cells import good_result, production_incident, with_events
from tests.verdict.stored_runs import store_run
from toto_compat import workflow
from toto_compat.cli import cli
from toto_compat.contract.events import Event, EventKind, Severity
from toto_compat.contract.request import Environment
from toto_compat.contract.result import Failure
from toto_compat.contract.suites import Suite
from toto_compat.errors import InputError, MatrixFileError, SelectionError, StorageError
from toto_compat.evidence.store import cell_path, find_run, load_run
from toto_compat.matrix.checkpoint import resolve_checkpoint
from toto_compat.matrix.load import load_matrix
from toto_compat.matrix.toto_source import without_password
from toto_compat.report.command import FORMATS
from toto_compat.runtimes import device
from toto_compat.runtimes.progress import PlainProgress, as_text, print_out, say
from toto_compat.runtimes.run import keep_log

__all__ = ["weights"]

ROOT = Path(__file__).parents[1]
ENVIRONMENT = "torch-2.13.0-cpu"
SECRET = "s3cr3t-t0ken"  # noqa: S105 - the tests look for it where it must not be
HOSTILE_NAMES = ["../x", "a/b", "..", ".hidden", "a b", "a;touch x", "$(touch x)", "`touch x`", "a\nb", "-rf", "a\0b"]
# What no display of ours writes: titles and clipboards, a bell, a cleared screen, a red text, 8-bit codes, reordering.
OBEYED = re.compile(r"\x1b\]|\x07|\x08|\x1b\[2J|\x1b\[31mred|[\x80-\x9f\u202e]")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "matrix.yaml").write_text(MATRIX_TEXT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(device, "find_gpus", tuple)
    return tmp_path


def matrix_with(project: Path, old: str, new: str) -> Path:
    text = (project / "matrix.yaml").read_text(encoding="utf-8")
    assert old in text
    path = project / "hostile.yaml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


# --- a hostile matrix.yaml --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE_NAMES)
@pytest.mark.parametrize("section", ["environments", "caches", "settings", "profiles", "workloads"])
def test_no_name_of_the_matrix_leads_out_of_a_folder_or_into_a_shell(project: Path, section: str, name: str) -> None:
    bodies = {
        "environments": '{torch: "2.13.0", build: cpu}',
        "caches": "{source: builtin}",
        "settings": "{}",
        "profiles": "{iterations: 1, workloads: [quick]}",
        "workloads": "{}",
    }
    if section == "settings":
        path = matrix_with(project, "settings: {stock: {}}", f"settings: {{stock: {{}}, {json.dumps(name)}: {{}}}}")
    else:
        path = matrix_with(project, f"{section}:\n", f"{section}:\n  {json.dumps(name)}: {bodies[section]}\n")
    with pytest.raises(MatrixFileError, match=section):
        load_matrix(path)


@pytest.mark.parametrize("name", [*HOSTILE_NAMES, "latest", "reference"])
def test_no_name_of_a_run_leads_out_of_the_results(project: Path, name: str) -> None:
    result = CliRunner().invoke(cli, ["matrix", "--run", name])
    assert isinstance(result.exception, SelectionError)
    assert not (project / "results").exists()


@pytest.mark.parametrize(
    "hostile",
    [
        'pins: {"-e git+https://host/evil": "1"}',
        'pins: {"numpy @ https://host/evil.whl #": "1"}',
        'pins: {"numpy; touch x": "1"}',
        'pins: {numpy: "1 --index-url http://host"}',
        'xformers: "1 --pre"',
        'toto_ts: "-r /etc/passwd"',
        'index: "--index-url=http://host"',
        'index: "https://host/a b"',
        'base_image: "python:3.11 --privileged"',
        'base_image: "--privileged"',
        'base_image: "python\\nRUN touch x"',
    ],
)
def test_nothing_in_an_environment_becomes_an_option_of_pip_or_of_the_engine(project: Path, hostile: str) -> None:
    path = matrix_with(project, 'torch: "2.13.0", build: cpu}', f'torch: "2.13.0", build: cpu, {hostile}}}')
    key = hostile.partition(":")[0]
    with pytest.raises(MatrixFileError, match=key):
        load_matrix(path)


@pytest.mark.parametrize("kind", ["lists", "mappings", "merges"])
def test_a_yaml_bomb_costs_neither_memory_nor_time(project: Path, kind: str) -> None:
    """Nine levels of nine would be 400 million values; the reader has 700 MB and ten seconds."""
    lines = {
        "lists": ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
        + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)],
        "mappings": ["a0: &a0 {k: x}"]
        + [f"a{n}: &a{n} {{{', '.join(f'k{i}: *a{n - 1}' for i in range(9))}}}" for n in range(1, 10)],
        "merges": ["a0: &a0 {k: x}"] + [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 10)],
    }
    (project / "bomb.yaml").write_text("\n".join(lines[kind]) + "\n" + MATRIX_TEXT, encoding="utf-8")

    def limits() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (700 << 20, 700 << 20))
        resource.setrlimit(resource.RLIMIT_CPU, (10, 10))

    done = subprocess.run(
        [sys.executable, "-m", "toto_compat.cli", "matrix", "--dry-run", "--matrix", "bomb.yaml"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        preexec_fn=limits,
        check=False,
    )
    assert done.returncode == MatrixFileError.code, done.stderr[-500:]
    assert "Traceback" not in done.stderr
    assert len(done.stderr) < 20_000


# --- hostile logs and results -----------------------------------------------------------------------------------------


def test_what_a_terminal_would_obey_is_taken_out_of_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for write, stream in ((say, 1), (print_out, 0)):
        write(f"first {ESCAPES}\nsecond")
        said = capsys.readouterr()[stream]
        assert re.fullmatch(r"first [\x20-\x7e]*\nsecond\n", said)
        assert "red" in said and "flipped" in said
    assert as_text("a\tplain line, ünïcode 漢\n") == "a plain line, ünïcode 漢\n"


def test_an_error_that_quotes_a_file_from_elsewhere_is_shown_and_not_obeyed(project: Path) -> None:
    run = store_run(project / "results", "hostile", [good_result()])
    told = json.loads((run / "run.json").read_bytes())
    (run / "run.json").write_text(json.dumps({**told, ESCAPES: 1}), encoding="utf-8")
    shown = seen_on_a_terminal([sys.executable, "-m", "toto_compat.cli", "report", "hostile"], project)
    assert "red2Jflipped: Extra inputs are not permitted" in shown
    assert OBEYED.findall(shown) == []


def test_a_cell_cannot_reach_the_terminal_through_what_it_prints_or_fails_with(project: Path) -> None:
    arguments = ["matrix", f"{ENVIRONMENT}/upstream/default", "--device", "cpu"]
    shown = seen_on_a_terminal(
        [sys.executable, "-m", "tests.runtimes.stub_runtime", json.dumps("escapes"), *arguments], project
    )
    assert "could not be run (crash: red) after" in shown  # while it ran
    assert f"could not be run: {ENVIRONMENT}/upstream/default: crash: red2Jflipped" in shown  # at the end
    assert "cells finished" in shown  # the live display was there
    assert OBEYED.findall(shown) == []


@pytest.mark.parametrize("command", [*(["report", "--format", form] for form in FORMATS), ["diff", "hostile"]])
def test_a_run_from_elsewhere_cannot_reach_the_terminal_through_a_report(project: Path, command: list[str]) -> None:
    result = with_events(
        production_incident(),
        Suite.RECOMPILE,
        Event(kind=EventKind.RECOMPILE_LIMIT, severity=Severity.ERROR, function=ESCAPES, reason=ESCAPES),
    )
    failed = good_result(cache="upstream").model_copy(update={"failure": Failure(kind="crash", message=ESCAPES)})
    run = store_run(project / "results", "hostile", [result, failed, good_result()])
    told = json.loads((run / "run.json").read_bytes())
    fields = dict.fromkeys(("runtime", "executor", "host", "git_revision"), ESCAPES)
    (run / "run.json").write_text(json.dumps({**told, **fields}), encoding="utf-8")
    name, *options = command
    shown = seen_on_a_terminal([sys.executable, "-m", "toto_compat.cli", name, "hostile", *options], project)
    assert shown and "Traceback" not in shown
    assert OBEYED.findall(shown) == []


def test_a_line_without_end_is_cut_and_neither_fills_memory_nor_the_log(project: Path) -> None:
    log = project / "cell.log"
    script = f"""
import resource
from collections import deque
from itertools import repeat
from pathlib import Path
from toto_compat.runtimes.cell_log import copy_to_log
resource.setrlimit(resource.RLIMIT_DATA, (200 << 20, 200 << 20))
copy_to_log(repeat("x" * 60_000, 5_000), Path({str(log)!r}), deque(maxlen=25), lambda line: None, longest=1_000_000)
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    text = log.read_text(encoding="utf-8")
    assert len(text) < 1_500_000
    assert "299.0 MB left out, a log is kept up to 1 MB" in text


@pytest.mark.parametrize("cell", ["../../secret/x", "a/../x", "a/b/..", "a/./x"])
def test_a_run_from_elsewhere_names_no_cell_outside_of_its_folder(project: Path, cell: str) -> None:
    with pytest.raises(StorageError, match="no name of a cell"):
        cell_path(project / "results" / "run", cell)


@pytest.mark.parametrize("cell", ["../../pwned", f"{ENVIRONMENT}/upstream/default"])
def test_a_log_is_kept_in_its_run_or_not_at_all(project: Path, cell: str) -> None:
    """Neither a name nor a linked folder leads it elsewhere; the cell itself is not lost by it."""
    run, log, elsewhere = project / "results" / "run", project / "cell.log", project / "elsewhere"
    run.mkdir(parents=True)
    elsewhere.mkdir()
    (run / "logs").symlink_to(elsewhere)
    log.write_text("said", encoding="utf-8")
    said: list[str] = []
    keep_log(cell, log, run, PlainProgress(1, write=said.append))
    assert "its log could not be kept" in said[0]
    assert log.exists() and not any(elsewhere.iterdir()) and not (project / "pwned.log").exists()


def test_a_run_of_hostile_names_is_refused_when_it_is_read(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflow, "open_runtime", lambda *_, **__: StubRuntime())
    CliRunner().invoke(cli, ["matrix", "--run", "one"])
    path = find_run("one") / "run.json"
    told = json.loads(path.read_bytes())
    path.write_text(json.dumps({**told, "cells": ["../../default"]}), encoding="utf-8")
    with pytest.raises(StorageError, match="no name of a cell"):
        load_run(find_run("one"))


@pytest.mark.parametrize("hostile", ["quick; touch x", "$(touch x)", "a\nexport LD_PRELOAD=/x.so #", "", "q" * 300])
@pytest.mark.parametrize("place", ["profile_name", "cache.name", "settings.backend"])
def test_nothing_of_a_run_from_elsewhere_gets_into_a_command_or_an_env_file_to_copy(
    project: Path, place: str, hostile: str
) -> None:
    """Reports name commands that get what is missing, and lines that a service's shell reads."""
    run = store_run(project / "results", "one", [good_result()])
    [path] = (run / "cells").rglob("*.json")
    told = json.loads(path.read_bytes())
    *folders, name = place.split(".")
    holder = told["request"][folders[0]] if folders else told["request"]
    holder[name] = hostile
    path.write_text(json.dumps(told), encoding="utf-8")
    with pytest.raises(StorageError, match="is no name"):
        load_run(run)


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt", "weights.pkl"])
def test_weights_that_run_code_when_they_are_read_are_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(InputError, match="run code when they are read") as refused:
        resolve_checkpoint(str(tmp_path), relative_to=tmp_path)
    assert name in str(refused.value) and "safetensors" in refused.value.hint


@pytest.mark.parametrize("start", [b"PK\x03\x04" + bytes(20), b"\x80\x04\x95" + bytes(20)])
def test_a_pickle_called_safetensors_is_refused(weights: Path, start: bytes) -> None:
    (weights / "model.safetensors").write_bytes(start)
    with pytest.raises(InputError, match="begins as a pickle or an archive does"):
        resolve_checkpoint(str(weights), relative_to=weights)


def test_a_header_whose_length_begins_like_a_pickle_is_none(weights: Path) -> None:
    (weights / "model.safetensors").write_bytes((0x80).to_bytes(8, "little") + b"{" + b" " * 127)
    assert resolve_checkpoint(str(weights), relative_to=weights) == weights.resolve()


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_no_token_and_no_password_is_in_anything_a_run_leaves(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the shell's variables nor of an index in matrix.yaml: not in results, cache, logs or on the screen."""
    matrix = matrix_with(
        project,
        'torch: "2.13.0", build: cpu}',
        f'torch: "2.13.0", build: cpu, index: "https://me:{SECRET}@host/simple"}}',
    )
    matrix.rename(project / "matrix.yaml")
    for name in ("HF_TOKEN", "PIP_INDEX_URL", "DOCKER_AUTH_CONFIG", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, f"https://me:{SECRET}@host/")
    runtime = StubRuntime("environment")
    monkeypatch.setattr(workflow, "open_runtime", lambda *_, **__: runtime)
    result = CliRunner().invoke(cli, ["matrix", f"{ENVIRONMENT}/*"])
    assert result.exit_code == 0, result.output
    assert SECRET not in result.output
    left = [path for path in project.rglob("*") if path.is_file() and path != project / "matrix.yaml"]
    assert len(left) > 10
    assert [str(path) for path in left if SECRET.encode() in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        (f"https://me:{SECRET}@host/simple", "https://host/simple"),
        (f"git+https://{SECRET}@host/fork@{'0' * 40}", f"git+https://host/fork@{'0' * 40}"),
        ("https://host/simple", "https://host/simple"),
    ],
)
def test_an_address_is_shown_without_its_password(address: str, shown: str) -> None:
    assert without_password(address) == shown


def test_the_log_of_a_build_has_no_password_of_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from toto_compat.environments import virtualenv

    environment = Environment(torch="2.13.0", build="cpu", index=f"http://me:{SECRET}@127.0.0.1:9/simple")
    said: list[str] = []
    log = tmp_path / "build.log"
    monkeypatch.setattr(virtualenv, "index_answers", lambda _: True)
    pip = [sys.executable, "-I", "-c", "print('pip')"]
    virtualenv._install_torch(pip, ENVIRONMENT, environment, log, said.append)
    assert SECRET not in log.read_text(encoding="utf-8") + "".join(said)
    assert "http://127.0.0.1:9/simple" in log.read_text(encoding="utf-8")


# --- the code itself --------------------------------------------------------------------------------------------------


def python_files() -> list[Path]:
    folders = [ROOT / name for name in ("toto_compat", "tests", "docker")]
    return [ROOT / "noxfile.py", *(path for folder in folders for path in sorted(folder.rglob("*.py")))]


GIVE_TO_A_SHELL = frozenset(
    {
        *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
        *("asyncio.create_subprocess_shell", "asyncio.subprocess.create_subprocess_shell"),
    }
)
# Tests whose subject is what a shell does with a text of the repository's own.
ABOUT_SHELLS = {
    "tests/environments/test_image.py",  # asks an image what is in it, inside a container
    "tests/fleet/test_workflows.py",  # runs the steps of the shipped workflow as GitHub does
}
SHELLS = frozenset({"sh", "ash", "bash", "dash", "ksh", "zsh", "fish"})


def shells_of(source: str) -> list[int]:
    """Lines that give a string to a shell: `shell=` anything but False, os.system and the like by whatever name they
    are imported, and commands such as ["bash", "-c", ...] whose last word is not written there."""
    tree = ast.parse(source)
    modules = {one.asname: one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
    return sorted({line for node in ast.walk(tree) for line in _shells_at(node, modules)})


def _shells_at(node: ast.AST, modules: Mapping[str | None, str]) -> Iterator[int]:
    match node:
        case ast.Call():
            asked = [word.value for word in node.keywords if word.arg == "shell"]
            if any(not (isinstance(value, ast.Constant) and value.value is False) for value in asked):
                yield node.lineno
            if _is_a_shells_command(node.args):
                yield node.lineno
        case ast.List() | ast.Tuple() if _is_a_shells_command(node.elts):
            yield node.lineno
        case ast.ImportFrom() if any(f"{node.module}.{one.name}" in GIVE_TO_A_SHELL for one in node.names):
            yield node.lineno
        case ast.Attribute():
            module, _, rest = ast.unparse(node).partition(".")
            if f"{modules.get(module, module)}.{rest}" in GIVE_TO_A_SHELL:
                yield node.lineno


def _is_a_shells_command(words: Sequence[ast.expr]) -> bool:
    """A shell, -c, and what is not written out there: a text that is, is a program like any other."""
    told = [word.value if isinstance(word, ast.Constant) else None for word in words]
    named = [place for place, word in enumerate(told) if isinstance(word, str) and Path(word).name in SHELLS]
    options = told[named[0] + 1 :] if named else []
    asked = [place for place, word in enumerate(options) if isinstance(word, str) and re.fullmatch(r"-\w*c", word)]
    return bool(asked) and not isinstance(([*options, None])[asked[0] + 1], str)


def test_no_string_is_given_to_a_shell_anywhere() -> None:
    searched = [path for path in python_files() if path.relative_to(ROOT).as_posix() not in ABOUT_SHELLS]
    assert [f"{path}:{line}" for path in searched for line in shells_of(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "source",
    [
        "subprocess.run('x', shell=True)",
        "run('x', shell=flag)",
        "os.system('x')",
        "os.popen('x')",
        "from os import system",
        "from subprocess import run, getoutput as get",
        "import os as o; o.system('x')",
        "run(['bash', '-c', text])",
        "run(('/usr/bin/env', 'sh', '-euc', f'{text}'))",
        "os.execlp('sh', 'sh', '-c', text)",
        "await asyncio.create_subprocess_shell(text)",
        "from asyncio import create_subprocess_shell",
    ],
)
def test_the_search_for_shells_finds_one(source: str) -> None:
    assert shells_of(source) == [1]


@pytest.mark.parametrize("source", ["run(['bash', '-c', 'true'])", "platform.system()", "run([python, '-c', text])"])
def test_the_search_for_shells_finds_none_where_there_is_none(source: str) -> None:
    assert shells_of(source) == []


# --- SECURITY.md ------------------------------------------------------------------------------------------------------

NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_test_that_the_document_names_is_there() -> None:
    named = NAMED.findall((ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(named) >= 20
    functions = {
        file: {
            node.name
            for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef)
        }
        for file in {file for file, _ in named}
    }
    assert [f"{file}::{test}" for file, test in named if test not in functions[file]] == []


def test_every_threat_of_the_document_names_a_test() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| threat")]
    assert len(rows) >= 10
    assert [row for row in rows if not NAMED.search(row) and "no test" not in row] == []
