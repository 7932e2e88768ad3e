"""The `toto-compat` command. Each subcommand lives beside its logic and is imported only when it is used."""

import importlib
import sys
from collections.abc import Mapping
from typing import NoReturn

import click

from toto_compat.contract.log_line import printable
from toto_compat.errors import ExitCode, MissingExtraError, TotoCompatError

# What the extra `matrix` brings, as it is imported: a slim install lacks it.
OF_THE_EXTRA = frozenset(
    {"docker", "huggingface_hub", "jinja2", "matplotlib", "platformdirs", "rich", "tabulate", "yaml"}
)

# name -> (module:command, one line for --help). Kept here so that `toto-compat --help` imports nothing else.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "matrix": (
        "toto_compat.workflow:matrix_command",
        "Run the cells of the matrix and say what can be compiled.",
    ),
    "status": ("toto_compat.detached:status_command", "Say how far a run on Slurm is; --wait waits for its end."),
    "cancel": ("toto_compat.detached:cancel_command", "Cancel the jobs of a run on Slurm."),
    "report": (
        "toto_compat.report.command:report_command",
        "Show a run: table, page, JSON, verdict, lines for an env file.",
    ),
    "diff": ("toto_compat.report.command:diff_command", "Compare two runs: better, worse, newly missing."),
    "merge": ("toto_compat.fleet.merge:merge_command", "Merge runs of several machines into one and judge it."),
    "jobs": ("toto_compat.fleet.jobs:jobs_command", "Turn a plan into the jobs of a CI system."),
    "issues": ("toto_compat.fleet.issues:issues_command", "Open one issue for every verdict that changed."),
    "analyze": ("toto_compat.production.analyze:analyze_command", "Read production logs for compiler events."),
    "toggle": ("toto_compat.production.toggle:toggle_command", "Switch compile on or off for the service."),
    "lint-env": ("toto_compat.production.lint_env:lint_env_command", "Find variables that do not do what they say."),
    "compare": ("toto_compat.production.compare:compare_command", "Compare eager and compiled on your own series."),
    "releases": ("toto_compat.releases.command:releases_command", "List torch releases against matrix.yaml; add one."),
    "schema": ("toto_compat.repro.schema:schema_command", "Print the JSON Schema of matrix.yaml, or of an incident."),
    "warm": ("toto_compat.production.warm:warm_command", "Compile what a service will need before it starts."),
    "doctor": ("toto_compat.runtimes.doctor:doctor_command", "Say what this machine can run, and how to get the rest."),
    "images": ("toto_compat.environments.images_command:images_command", "List, build or remove container images."),
    "fetch": (
        "toto_compat.environments.wheelhouse:fetch_command",
        "Get the wheels of environments for a build without network.",
    ),
    "lock": ("toto_compat.environments.locks:lock_command", "Pin every package of environments with its hash."),
    "sbom": (
        "toto_compat.environments.sbom_command:sbom_command",
        "Print what an environment consists of, as CycloneDX JSON.",
    ),
    "shell": ("toto_compat.runtimes.shell:shell_command", "Open a shell in an environment, as a cell sees it."),
    "repro": (
        "toto_compat.repro.command:repro_command",
        "Run a production incident again: reproduced, or what differed.",
    ),
    "claims": (
        "toto_compat.repro.claims:claims_command",
        "Hold earlier documents against stored evidence.",
    ),
    "bench": ("toto_compat.bench.command:bench_command", "Measure fixed_size against the other caches."),
    "false-alarms": (
        "toto_compat.false_alarms:false_alarms_command",
        "Try what is right under many seeds: no gate may fail it.",
    ),
    "reference": (
        "toto_compat.reference.command:reference_command",
        "Make the committed reference results and what README shows of them.",
    ),
    "release-check": (
        "toto_compat.releases.upgrade_command:release_check_command",
        "Try a torch release and say whether to upgrade to it.",
    ),
    "bisect": ("toto_compat.releases.bisect_command:bisect_command", "Find the torch release at which a gate flips."),
    "gpu-acceptance": (
        "toto_compat.acceptance.command:gpu_acceptance_command",
        "Try once, on a GPU, what was only predicted without one.",
    ),
    "prune": ("toto_compat.runtimes.prune:prune_command", "Remove virtualenvs that no environment needs any more."),
}

# How `--help` groups them: heading -> commands.
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "The question": ("matrix", "report", "diff", "doctor", "gpu-acceptance"),
    "In production": ("toggle", "warm", "analyze", "lint-env", "compare"),
    "Incidents": ("repro", "claims"),
    "PyTorch releases": ("releases", "release-check", "bisect"),
    "Pinned environments": ("images", "fetch", "lock", "sbom", "shell", "prune"),
    "Clusters and many machines": ("status", "cancel", "merge", "jobs", "issues"),
    "About this project itself": ("reference", "bench", "false-alarms", "schema"),
}


class LazyGroup(click.Group):
    """Imports a subcommand when it is called: `analyze` on a log must not wait for the Docker SDK."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module_name, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module_name), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        for heading, names in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, COMMANDS[name][1]) for name in names])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="toto-compat")
def cli() -> None:
    """Can torch.compile be switched back on for Toto? For which PyTorch, which KV cache, which mode?

    `toto-compat matrix` finds out. `toto-compat COMMAND --help` explains a command.
    """


def missing_extra(error: ModuleNotFoundError) -> MissingExtraError | None:
    """Name the extra where a package of it is missing; None: something else is, and that is a bug."""
    package = (error.name or "").partition(".")[0]
    if package not in OF_THE_EXTRA:
        return None
    return MissingExtraError(
        f"this command needs the package {package}, which a slim install leaves out",
        hint="pip install 'toto-compat[matrix]'",
    )


def main() -> NoReturn:
    """Run the command; turn a TotoCompatError into its message and exit code."""
    try:
        ended = cli(standalone_mode=False)
    except TotoCompatError as error:
        # a message may quote a log or a file of somebody else's
        click.echo("\n".join(printable(line) for line in f"error: {error}".split("\n")), err=True)
        sys.exit(error.code)
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        click.echo(f"error: {missing}", err=True)
        sys.exit(missing.code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(ExitCode.INTERRUPTED)
    # without standalone mode click's own exit is a return value
    sys.exit(ended if isinstance(ended, int) else ExitCode.OK)


if __name__ == "__main__":
    main()
