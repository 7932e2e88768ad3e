"""What a torch wheel says of itself: its CUDA, its Python, what it needs. Kilobytes are read of it, never the wheel.

The metadata is read where the index serves it beside the wheel (PEP 658), else out of the wheel by ranges. Wheels do
not change, so what was read once is kept by the wheel's hash.
"""

import email.parser
import hashlib
import re
from collections.abc import Iterable
from contextlib import suppress

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName, default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import ValidationError

from toto_compat.contract.strict_model import StrictModel
from toto_compat.environments.package_index import HINT, IndexSettings, WheelFile, open_url, read_answer, redacted
from toto_compat.environments.wheel_sources import sources
from toto_compat.errors import EnvironmentBuildError, StorageError
from toto_compat.evidence.files import cache_folder, write_model

# The wheel brings CUDA as these packages, whose version is CUDA's own; their names changed with CUDA 13.
_CUDA_PACKAGES = re.compile(r"^(cuda-toolkit|nvidia-cuda-(runtime|nvrtc)(-cu\d+)?)$")
_VERSION_FILE = "torch/version.py"
_LIBRARY = "torch/lib/libtorch_python.so"
# what torch.cuda.get_arch_list() answers is one string in there
_ARCHITECTURES = re.compile(rb"(?:(?:sm|compute)_\d{2,3}[a-z]? )+(?:sm|compute)_\d{2,3}[a-z]?")


class WheelFacts(StrictModel):
    """Holds what the metadata of a wheel says."""

    version: str  # with the local part, where the wheel itself names one
    cuda: str  # 12.8; empty: a CPU build
    requires_python: str = ""
    requirements: tuple[str, ...] = ()  # as they stand in the metadata, those of extras left out
    read_from: str  # 'core metadata', or 'the wheel, by ranges'

    @property
    def build(self) -> str:
        return f"cu{self.cuda.replace('.', '')}" if self.cuda else "cpu"

    def compiles_on(self, python: str) -> bool:
        """Tell if the wheel installs on this Python and brings Triton there, which CUDA code is compiled with."""
        if not _admits(self.requires_python, python):
            return False
        markers = [one.marker for one in map(Requirement, self.requirements) if canonicalize_name(one.name) == "triton"]
        return not markers or any(_holds(marker, python) for marker in markers)


def _holds(marker: object, python: str) -> bool:
    if marker is None:
        return True
    target: dict[str, str] = {name: str(value) for name, value in default_environment().items()}
    target |= {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "sys_platform": "linux",
    }
    try:
        return bool(marker.evaluate(target))  # type: ignore[attr-defined]
    except (UndefinedComparison, UndefinedEnvironmentName):
        return True  # a condition that cannot be decided is no reason to refuse a Python


def _admits(specifier: str, python: str) -> bool:
    try:
        # of 3.12 the newest patch release counts: >=3.12.1 is no reason to refuse it
        return SpecifierSet(specifier).contains(Version(f"{python}.99"))
    except InvalidSpecifier:
        return True


def read_facts(wheel: WheelFile, settings: IndexSettings) -> WheelFacts:
    """Read a wheel's metadata; what was read before is taken from the cache folder."""
    name = wheel.sha256 or hashlib.sha256(redacted(wheel.url).encode()).hexdigest()
    kept = cache_folder() / "wheel-facts" / f"{name}.json"
    try:
        if wheel.sha256:
            return WheelFacts.model_validate_json(kept.read_bytes())
    except (OSError, ValidationError):
        pass
    facts = _read_facts(wheel, settings)
    if wheel.sha256:
        with suppress(StorageError):  # a cache that cannot be written costs time, nothing else
            write_model(kept, facts)
    return facts


def _read_facts(wheel: WheelFile, settings: IndexSettings) -> WheelFacts:
    if wheel.has_metadata:
        try:
            with open_url(f"{wheel.url}.metadata", settings) as answer:
                text = read_answer(answer).decode("utf-8", errors="replace")
            facts = facts_of(text, "", "core metadata") if _is_of(text, wheel) else None
        except (OSError, ValueError):
            facts = None  # promised and not served, or a page of another kind: the wheel itself has it too
        # metadata that names no CUDA may be of a CPU build, or of one that brings CUDA inside
        if facts is not None and (facts.cuda or wheel.version.local):
            return _with_local(facts, wheel)
    wanted = (".dist-info/METADATA", _VERSION_FILE)
    files = _read_files(wheel, settings, wanted)
    # a wheel may carry metadata of others that it brings inside
    own = (text.decode("utf-8", errors="replace") for file, text in files.items() if file.endswith("/METADATA"))
    metadata = next((text for text in own if _is_of(text, wheel)), None)
    if metadata is None:
        raise EnvironmentBuildError(
            f"{wheel.file}: the wheel holds no metadata of its own", hint="the index serves a broken file"
        )
    version_py = files.get(_VERSION_FILE, b"").decode("utf-8", errors="replace")
    return _with_local(facts_of(metadata, version_py, "the wheel, by ranges"), wheel)


def _is_of(metadata: str, wheel: WheelFile) -> bool:
    """Tell if this is the metadata of that wheel, and not a page that says something else."""
    message = email.parser.HeaderParser().parsestr(metadata)
    try:
        version = Version(str(message["Version"]))
    except InvalidVersion:
        return False
    same_release = Version(version.public) == Version(wheel.version.public)
    return same_release and canonicalize_name(str(message["Name"])) == wheel.project


def _with_local(facts: WheelFacts, wheel: WheelFile) -> WheelFacts:
    """Take the build from a file's own name where it has one: torch-2.16.0.dev20261116+cu130-..."""
    local = wheel.version.local or ""
    named = re.fullmatch(r"cu(\d+)(\d)", local)
    if named:
        return facts.model_copy(update={"cuda": f"{named[1]}.{named[2]}"})
    return facts.model_copy(update={"cuda": ""}) if local == "cpu" else facts


def _read_files(wheel: WheelFile, settings: IndexSettings, endings: Iterable[str]) -> dict[str, bytes]:
    try:
        return dict(sources(wheel.url, lambda name: name.endswith(tuple(endings)), settings))
    except OSError as error:
        raise EnvironmentBuildError(
            f"{wheel.file}: its metadata cannot be read from {redacted(wheel.url)}: {error}", hint=HINT
        ) from error


def facts_of(metadata: str, version_py: str, read_from: str) -> WheelFacts:
    """Make facts of a METADATA file, and of torch/version.py where it was read."""
    message = email.parser.HeaderParser().parsestr(metadata)
    requirements = [one for text in message.get_all("Requires-Dist") or () if (one := _requirement(text))]
    said = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", version_py, re.MULTILINE)
    full = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", version_py, re.MULTILINE)
    return WheelFacts(
        version=full[1] if full else str(message["Version"] or ""),
        cuda=cuda_release(said[1]) if said else _cuda_of(requirements),
        requires_python=str(message["Requires-Python"] or ""),
        requirements=tuple(str(one) for one in requirements),
        read_from=read_from,
    )


def _requirement(text: str) -> Requirement | None:
    """Read a requirement of the wheel itself; None for one of an extra, or one that nobody can read."""
    try:
        one = Requirement(text)
    except InvalidRequirement:
        return None
    return None if one.marker and "extra" in str(one.marker) else one


def _cuda_of(requirements: Iterable[Requirement]) -> str:
    for one in requirements:
        if _CUDA_PACKAGES.match(canonicalize_name(one.name)):
            exact = [item.version for item in one.specifier if item.operator in ("==", "===")]
            if exact and (cuda := cuda_release(exact[0])):
                return cuda
    return ""


def cuda_release(version: str) -> str:
    """CUDA's version as torch's builds are named by it; empty where it cannot be told, as of `13.*`."""
    found = re.match(r"(\d{2})\.(\d)(\.|$)", version)
    return f"{found[1]}.{found[2]}" if found else ""


def read_architectures(wheel: WheelFile, settings: IndexSettings) -> tuple[str, ...]:
    """Read which GPUs the wheel has kernels for, from ten of its megabytes; empty where it does not say."""
    content = _read_files(wheel, settings, [_LIBRARY]).get(_LIBRARY, b"")
    found = [match.group().decode() for match in _ARCHITECTURES.finditer(content)]
    longest = max(found, key=len, default="")
    return tuple(dict.fromkeys(word for word in longest.split() if word.startswith("sm_")))
