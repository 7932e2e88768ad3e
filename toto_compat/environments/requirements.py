"""The packages that an environment consists of, in the order in which they are installed."""

from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from toto_compat.contract.request import Environment
from toto_compat.matrix.toto_source import toto_source

FORK = "toto-ts of"

# What toto-ts's model and forecaster import. toto-ts itself pins torch and much more, so it goes in without
# dependencies; exact versions are toto-ts 0.2.0's own.
TOTO_DEPENDENCIES: dict[str, str] = {
    "beartype": "",
    "einops": "==0.7.0",
    "gluonts": "==0.16.2",
    "huggingface_hub": "",
    "jaxtyping": "==0.2.29",
    "lightning": "",
    "numpy": "<2",
    "pandas": "",
    "rotary-embedding-torch": "==0.8.6",
    "safetensors": "",
    "scipy": "",
    "tqdm": "",
    "typeguard": "==2.13.3",
}
CELL_DEPENDENCIES: dict[str, str] = {"pydantic": ">=2.7"}  # the request and result files


@dataclass(frozen=True)
class Requirements:
    """Three installs: torch alone, the rest under the constraint that torch stays, what must bring nothing along.

    A fork of toto-ts is named by what is in it; `environments.fork` makes the wheel that stands for it.
    """

    torch: str
    others: tuple[str, ...]
    without_dependencies: tuple[str, ...]

    def without_dependencies_by(self, fork_wheel: Path | None) -> tuple[str, ...]:
        """List what pip installs without dependencies, the fork as its wheel."""
        return tuple(str(fork_wheel) if one.startswith(FORK) else one for one in self.without_dependencies)


def requirements_of(environment: Environment) -> Requirements:
    """List an environment's packages; its pins replace the defaults of the same name and add the rest."""
    pins = {canonicalize_name(name): f"=={version}" for name, version in environment.pins.items()}
    defaults = {
        canonicalize_name(name): version for name, version in {**TOTO_DEPENDENCIES, **CELL_DEPENDENCIES}.items()
    }
    others = tuple(f"{name}{version}" for name, version in sorted({**defaults, **pins}.items()))
    fork = toto_source(environment.toto_ts)
    bare = [f"toto-ts=={environment.toto_ts}" if fork is None else f"{FORK} {fork.identity}"]
    if environment.xformers:
        bare.append(f"xformers=={environment.xformers}")
    return Requirements(f"torch=={environment.torch}", others, tuple(bare))
