"""All tests with one closing line: the host side with this interpreter, the cell side with a real torch environment.

`nox -s tests` calls it. Arguments go to both pytest runs, which go on beside each other; the cell side's output follows
the host side's. The pinned environment stays as the runtime made it: pytest for the cell side lives in a folder of its
own, last on that interpreter's path.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

from tests.compiler_cache import write_compiler_cache
from tests.conftest import PROCESSOR_SECONDS
from toto_compat.environments.pythons import find_compiler
from toto_compat.environments.virtualenv import build_venv
from toto_compat.errors import TotoCompatError
from toto_compat.matrix.load import load_matrix

ROOT = Path(__file__).parent.parent
CELL_ENVIRONMENT = "torch-2.13.0-cpu"
SHOWN = 25  # modules that took longest
NO_TESTS_COLLECTED = 5  # pytest's exit code; fine for one side, not for both
# a module on one worker, and in the order of collection: left alone, xdist would begin with the modules of most tests
IN_ORDER = ("--dist=loadfile", "--no-loadscope-reorder")
# The container tests are the longest chain, and all containers together weigh as much as one process outside of them:
# what is busy beside them makes way.
MAKE_WAY = ("nice", "-n", "10")
RUN_PYTEST = "import sys; sys.path.append(sys.argv.pop(1)); import pytest; sys.exit(pytest.main())"


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="toto-compat-tests-") as folder:
        host_report, cell_report = Path(folder, "host.xml"), Path(folder, "cell.xml")
        with contextlib.suppress(TotoCompatError):  # tests that need a compiler say so themselves
            os.environ["CXX"] = str(write_compiler_cache(Path(folder), find_compiler()))
        with Path(folder, "cell.log").open("w+", encoding="utf-8") as log, ThreadPoolExecutor() as pool:
            cell_side = pool.submit(run_cell_side, arguments, cell_report, log)
            codes = [run_host_side(arguments, host_report)]
            print("== the tests that run inside a torch environment", flush=True)
            codes.append(cell_side.result())
            log.seek(0)
            shutil.copyfileobj(log, sys.stdout)
        outcomes = count_outcomes(host_report) + count_outcomes(cell_report)
        for side, report in (("host", host_report), ("cell", cell_report)):
            print(where_the_time_went(side, report), flush=True)
    print(f"{outcomes['passed']} passed, {outcomes['failed']} failed, {outcomes['skipped']} skipped", flush=True)
    if set(codes) == {NO_TESTS_COLLECTED}:
        return NO_TESTS_COLLECTED
    worst = max((code for code in codes if code != NO_TESTS_COLLECTED), default=0)
    return worst or int(outcomes["failed"] > 0)


def run_host_side(arguments: list[str], report: Path) -> int:
    command = [sys.executable, "-m", "pytest", "--side=host", "-n3", *IN_ORDER, f"--junitxml={report}"]
    return subprocess.run([*command, *arguments], cwd=ROOT, check=False).returncode


def run_cell_side(arguments: list[str], report: Path, log: TextIO) -> int:
    try:
        python = cell_python(log)
    except TotoCompatError as error:
        print(f"the cell-side tests cannot run: {error}", file=log, flush=True)
        return error.code
    pytest = [str(python), "-c", RUN_PYTEST, str(pytest_folder(python))]
    command = [*MAKE_WAY, *pytest, "--side=cell", "-n2", *IN_ORDER]
    # one thread per worker, as in a cell: two workers on two cores must not fight over them
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command += [f"--junitxml={report}", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT, check=False
    ).returncode


def cell_python(log: TextIO) -> Path:
    """The interpreter of the cell environment, built on first use by the project's own runtime."""
    environment = load_matrix(ROOT / "matrix.yaml").environments[CELL_ENVIRONMENT]
    return Path(build_venv(CELL_ENVIRONMENT, environment, lambda line: print(line, file=log, flush=True)).python)


def pytest_folder(python: Path) -> Path:
    """Where the test packages for the cell's interpreter are, installed on first use."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]["cell-test"]
    identity = hashlib.sha256(repr((str(python), packages)).encode()).hexdigest()[:12]
    folder = Path(sys.prefix) / f"cell-pytest-{identity}"
    if not folder.is_dir():
        unfinished = folder.with_suffix(".unfinished")
        install = [python, "-m", "pip", "install", "-q", "--upgrade", "--target", unfinished, *packages]
        installed = subprocess.run(install, capture_output=True, text=True, check=False)
        if (
            installed.returncode
        ):  # else not shown: pip lists toto-ts's pins, which the environment leaves unmet on purpose
            sys.exit(f"pytest for the cell side could not be installed:\n{installed.stderr}")
        unfinished.rename(folder)
    return folder


def count_outcomes(report: Path) -> Counter[str]:
    """How the tests of one JUnit report ended; a run that left no report counts nothing, its exit code speaks."""
    outcomes: Counter[str] = Counter()
    if not report.is_file():
        return outcomes
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            outcomes["failed"] += 1
        else:
            outcomes["skipped" if "skipped" in kinds else "passed"] += 1
    return outcomes


def where_the_time_went(side: str, report: Path) -> str:
    """Name the modules that took longest, over all workers: the place to look when the tests take too long."""
    waited: defaultdict[str, float] = defaultdict(float)
    worked: defaultdict[str, float] = defaultdict(float)
    for case in ET.parse(report).iter("testcase") if report.is_file() else ():
        module = case.get("classname", "").removeprefix("tests.")
        waited[module] += float(case.get("time", 0))
        taken = case.find(f"properties/property[@name='{PROCESSOR_SECONDS}']")
        worked[module] += 0.0 if taken is None else float(taken.get("value", 0))
    modules = sorted(waited, key=lambda module: -max(waited[module], worked[module]))
    longest = ", ".join(f"{module} {waited[module]:.0f} ({worked[module]:.0f})" for module in modules[:SHOWN])
    return (
        f"seconds of the {side} side by module, of {sum(waited.values()):.0f} over all workers "
        f"({sum(worked.values()):.0f} of a processor, containers not counted): {longest}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
