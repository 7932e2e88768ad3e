# /// script
# requires-python = ">=3.11"
# dependencies = ["nox>=2025.2.9", "pyyaml>=6"]
#
# [tool.nox]
# script-venv-backend = "virtualenv"
# ///
"""The front door: `nox -s matrix` does the whole job, `nox -l` lists the rest. Arguments after `--` are passed on.

The block above makes nox run this file in a small virtualenv of its own with PyYAML in it, so that matrix.yaml can
name the `cell(...)` sessions. virtualenv and pip, not uv: pip's index settings on this machine must hold.
"""

import hashlib
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
MATRIX_FILE = ROOT / "matrix.yaml"

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["matrix"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"


def environment_names() -> list[str]:
    """The environments of matrix.yaml; none, with a warning, where the file or PyYAML is not fit to be read."""
    try:
        import yaml
    except ModuleNotFoundError:
        nox.logger.logger.warning(
            "no cell(...) sessions: PyYAML is missing and nox was told not to install it (script mode `none`). "
            "`pip install pyyaml`, or use `nox -s matrix -- '<environment>/*'`."
        )
        return []
    try:
        # the file as it is written, and not what it stands for: a few lines of aliases are more than memory holds
        file = yaml.compose(MATRIX_FILE.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        sections = {name.value: section for name, section in getattr(file, "value", ())}
        return [name.value for name, _ in sections["environments"].value if isinstance(name, yaml.ScalarNode)]
    except (OSError, ValueError, yaml.YAMLError, TypeError, KeyError, RecursionError):
        # `toto-compat matrix` reads the same file and says file, line and key
        nox.logger.logger.warning("no cell(...) sessions: matrix.yaml cannot be read. `nox -s matrix` says why.")
        return []


def install(session: nox.Session, *groups: str) -> None:
    """Install this project, editable, once: pip is not asked again until pyproject.toml or the request changes."""
    pyproject = (ROOT / "pyproject.toml").read_bytes()
    wanted = hashlib.sha256(pyproject + repr((str(ROOT), groups)).encode()).hexdigest()
    stamp = Path(session.virtualenv.location) / "toto-compat-installed"
    if stamp.is_file() and stamp.read_text(encoding="ascii") == wanted:
        return
    listed = nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), *groups)
    # None under `nox --no-install`: then nothing was installed and nothing may be marked so
    if session.run_install("python", "-m", "pip", "install", "-q", "-e", f"{ROOT}[matrix,logs,slurm]", *listed):
        stamp.write_text(wanted, encoding="ascii")


@nox.session
def matrix(session: nox.Session) -> None:
    """Run the matrix and print the table: which PyTorch, cache and mode can be compiled."""
    install(session)
    # a first Ctrl-C lets the runner stop its cells and say how to resume; nox's own grace is a third of a second
    session.run("toto-compat", "matrix", *session.posargs, interrupt_timeout=60, terminate_timeout=20)


@nox.session(venv_backend="none")
@nox.parametrize("environment", [nox.param(name, id=name) for name in environment_names()])
def cell(session: nox.Session, environment: str) -> None:
    """Run every cell of one environment."""
    # through the matrix session, so that all environments share its virtualenv
    command = [sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), "-s", "matrix", "--", f"{environment}/*"]
    session.run(*command, *session.posargs, external=True, interrupt_timeout=90, terminate_timeout=30)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff check, ruff format and mypy in strict mode."""
    install(session, "lint", "test")
    session.run("ruff", "check", *session.posargs, ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """All tests, host side and cell side; `-- -k name` and other pytest arguments go to both."""
    install(session, "test")
    session.run("python", str(ROOT / "tests" / "run_all.py"), *session.posargs, interrupt_timeout=60)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure fixed_size against the other caches; `-- --json FILE` writes the figures."""
    install(session)
    session.run("toto-compat", "bench", *session.posargs, interrupt_timeout=60, terminate_timeout=20)


@nox.session
def false_alarms(session: nox.Session) -> None:
    """Upstream eager and fixed_size under many seeds, which no gate may fail: `-- --runs 20`."""
    install(session)
    session.run("toto-compat", "false-alarms", *session.posargs, interrupt_timeout=60, terminate_timeout=20)


@nox.session
def gpu_acceptance(session: nox.Session) -> None:
    """The first hour on a GPU: what was only predicted without one; `-- --rehearse` walks through it on a CPU."""
    install(session)
    session.run("toto-compat", "gpu-acceptance", *session.posargs, interrupt_timeout=60, terminate_timeout=20)


@nox.session
def release_check(session: nox.Session) -> None:
    """Try a torch release, `-- 2.14.1` or the newest one that matrix.yaml lacks, and say whether to upgrade to it."""
    install(session)
    session.run("toto-compat", "release-check", *session.posargs, interrupt_timeout=60, terminate_timeout=20)


@nox.session
def reference(session: nox.Session) -> None:
    """Make results/reference release by release, then README's table, its picture and the page: `-- --only 2.13.0`."""
    install(session, "docs")
    session.run("toto-compat", "reference", *session.posargs, interrupt_timeout=60, terminate_timeout=20)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the docs site into site/, strictly; `-- --serve` shows it and follows changes."""
    install(session, "docs")
    session.run("python", str(ROOT / "docs" / "build.py"), *session.posargs)


@nox.session
def lock(session: nox.Session) -> None:
    """Write docker/locks/<environment>.txt with a hash for every package; `-- ENVIRONMENT...` for some only."""
    install(session)
    session.run("toto-compat", "lock", *session.posargs)


@nox.session
def repro(session: nox.Session) -> None:
    """Run a production incident again: `-- incidents/2025-10-30-recompile-limit.yaml [--explain]`."""
    install(session)
    session.run("toto-compat", "repro", *session.posargs, interrupt_timeout=60, terminate_timeout=20)


@nox.session
def audit(session: nox.Session) -> None:
    """Ask for known vulnerabilities of every locked package; skipped, and said so, where nobody can be asked."""
    session.install("pip-audit")
    told = session.run("python", str(ROOT / "docker" / "audit.py"), *session.posargs, success_codes=[0, 3], silent=True)
    if isinstance(told, str):
        session.log(told.strip())
        if "NOT AUDITED" in told:
            session.skip("the vulnerability data cannot be reached from here: nothing was audited")


@nox.session
def faults(session: nox.Session) -> None:
    """Inject faults into runs, resume them, and print what was lost: `-- --only NAME --seed N --moments 20`."""
    install(session, "test")
    session.run("python", "-m", "tests.faults", *session.posargs, interrupt_timeout=60, terminate_timeout=20)
