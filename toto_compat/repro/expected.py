"""What of an event that was logged must come again: what says where and why, not what every process counts anew."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from packaging.version import Version

from toto_compat.contract.events import Event, EventKind
from toto_compat.contract.failure_messages import FAILURE_KINDS
from toto_compat.contract.torch_releases import CONFIG_NAMES, config_name
from toto_compat.environments.torch_sources.defaults import default_releases, torch_defaults
from toto_compat.repro.redaction.parts import REDACTED
from toto_compat.repro.redaction.text import redact

OF_CUDA = frozenset(
    {EventKind.CUDAGRAPH_SKIP, EventKind.CUDAGRAPH_PARTITION, EventKind.CUDAGRAPH_OVERWRITTEN, EventKind.TRITON_ERROR}
)
# Their files and lines are the same wherever the same releases are installed.
_INSTALLED = ("toto/", "torch/", "toto_compat/")
_LONGEST_ERROR = 400
_RESUMED = "torch_dynamo_resume_in_"


def expected_event(event: Event) -> dict[str, Any]:
    """Say what must come again: of a limit hit all that the log says, of the rest what no other workload changes.

    Of a compile id only how often its frame was compiled: frames are numbered as a process meets them, and a service
    meets others first. A file of the service's own is not where this is run.
    """
    expected: dict[str, Any] = {"kind": event.kind.value} | ({"needs": "cuda"} if event.kind in OF_CUDA else {})
    if event.kind in FAILURE_KINDS:
        return expected
    if event.kind in OF_CUDA:
        # how many inputs are mutated the model says
        like = _like(re.sub(r"\(\d+ instances?\)", "(*", redact(event.reason)))
        return expected | {"reason_like": like, "predicted_by": ["cuda_lowering", "cudagraph"]}
    installed = is_installed(event)
    if event.function and (installed or not event.function.startswith(_RESUMED)):
        expected["function"] = redact(event.function)
    if installed:
        expected |= {"file": redact(event.file)} | ({"line": event.line} if event.line else {})
    if event.kind is EventKind.RECOMPILE_LIMIT:
        expected |= {"limit": event.limit} if event.limit else {}
        expected |= _reason_of_limit(redact(event.reason))
    elif event.reason and REDACTED not in (clean := redact(event.normalised_reason)):
        expected["normalised_reason"] = clean
    return expected


def is_installed(event: Event) -> bool:
    """Tell if an event is of code that an environment has, and not of the service's own."""
    return event.file.startswith(_INSTALLED)


def _reason_of_limit(reason: str) -> dict[str, str]:
    unnumbered = re.sub(r"^\d+/(?=\d+(?:_\d+)?: )", "*/", reason)
    if not reason:
        return {}
    # a guard that says nothing yet was cut, by a wrap or at the end of a line
    whole = unnumbered if re.search(r"[=<>(!]|\b(in|is|not)\b", unnumbered) else f"{unnumbered}*"
    return {"reason": reason} if whole == reason and REDACTED not in reason else {"reason_like": _like(whole)}


def _like(reason: str) -> str:
    # what was taken out may be anything when it comes again
    return reason.replace(REDACTED, "*")


def error_again(error: str) -> str:
    """Open in an error what another process or machine says differently: addresses, paths, and secrets."""
    said = re.sub(r"0x[0-9a-fA-F]+|(?<![\w.])(?:/[\w.+@-]+){2,}/?", "*", _like(redact(error)))
    return said if len(said) <= _LONGEST_ERROR else f"{said[:_LONGEST_ERROR]}*"


# --- limits -----------------------------------------------------------------------------------------------------------


def setting_of(limit_name: str) -> str:
    """Name the setting that a limit in a log is, which was called something else before 2.7; '' for none of them."""
    return next((name for name, ages in CONFIG_NAMES.items() if limit_name in {spelled for _, spelled in ages}), "")


def torchs_own(setting: str, release: str) -> int | None:
    """Return the default of a limit in a release; of one that the table lacks, that of the release before it."""
    known = default_releases()
    at = next((one for one in reversed(known) if Version(one) <= Version(release)), known[0])
    value = torch_defaults(at).get(f"dynamo.{config_name(setting, at)}")
    return value if isinstance(value, int) else None


def limits_in(hits: Iterable[tuple[str, int]]) -> Mapping[str, tuple[int, ...]]:
    """Gather the limits that were hit by the setting that each is, in the order of the log."""
    found: dict[str, dict[int, None]] = {}
    for name, limit in hits:
        if setting := setting_of(name):
            found.setdefault(setting, {})[limit] = None
    return {setting: tuple(limits) for setting, limits in found.items()}
