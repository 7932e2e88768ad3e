"""The end of an acceptance: one folder with evidence, environments, logs, pages and claims, fit to be committed.

It is a run like any other, that of the production check, with the rest of the acceptance beside it:

    run.json, cells/, compatibility.*     the production check: `toto-compat report` shows it
    acceptance.json, .md, .html           steps and claims
    lowering/, device/, sabotaged_*/      the other runs
    environments.json, doctor.json, logs/
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from jinja2 import DictLoader, Environment, StrictUndefined
from pydantic import Field
from tabulate import tabulate

from toto_compat.acceptance import sabotages
from toto_compat.acceptance.campaign import REHEARSAL, Campaign, Ended, StepName
from toto_compat.acceptance.claims import INTERPRETED_RUN, Claim, as_a_step, claims_of, evidence_in
from toto_compat.acceptance.trials import DEVICE, LOWERING, PRODUCTION_CHECK, told_by_runs
from toto_compat.contract.request import Device
from toto_compat.contract.result import CellResult
from toto_compat.contract.strict_model import StrictModel
from toto_compat.errors import RefusedError
from toto_compat.evidence.files import (
    cache_folder,
    read_bytes,
    read_model,
    storage_errors,
    write_atomically,
    write_model,
)
from toto_compat.evidence.left_file import read_left_file
from toto_compat.evidence.store import Run, load_run, write_run_info

BUNDLE, ACCEPTANCE_FILE = "bundle", "acceptance.json"
_MAKING = ".bundle"  # until it is whole
PUBLISHED = Path("reference/cuda")  # below the results folder
_LOG_BYTES = 64_000  # the end of each: what went wrong stands there


class AcceptanceReport(StrictModel):
    """acceptance.json: what was found, and whether anything of it was found on a GPU."""

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    rehearsal: bool
    warning: str = ""
    campaign: Campaign
    claims: tuple[Claim, ...]


def make_bundle(folder: Path, campaign: Campaign, claims: Sequence[Claim], doctor: Sequence[Mapping[str, Any]]) -> Path:
    """Put the bundle together from the runs in an acceptance's folder; one that was there is replaced in the end."""
    bundle = folder / _MAKING
    _remove(bundle)
    warning = REHEARSAL if campaign.about.rehearsal else ""
    main = load_run(folder / PRODUCTION_CHECK)
    _copy_run(main, bundle)
    name = "cuda-rehearsal" if campaign.about.rehearsal else "cuda"
    write_run_info(bundle, load_run(bundle).info.model_copy(update={"name": name}))
    others = [run for run in _runs_in(folder) if run.name != PRODUCTION_CHECK]
    for other in others:
        _copy_run(load_run(other), bundle / other.name)
    for run in (main.folder, *others):
        for log in sorted(run.glob("logs/**/*.log")):
            kept = bundle / "logs" / run.name / log.relative_to(run / "logs")
            write_atomically(kept, without_places(_end_of(log), folder))
    runs = [main, *(load_run(other) for other in others)]
    environments = {
        cell.cell.environment: environment_of(cell) for run in runs for cell in run.cells if cell.provenance.torch
    }
    for name, told in (("environments", environments), ("doctor", list(doctor))):
        text = json.dumps(told, indent=1, ensure_ascii=False)  # else a folder with an accent is not found in it
        write_atomically(bundle / f"{name}.json", without_places(text, folder) + "\n")
    whole = AcceptanceReport(
        rehearsal=campaign.about.rehearsal, warning=warning, campaign=campaign, claims=tuple(claims)
    )
    # steps and claims quote what failed
    report = AcceptanceReport.model_validate_json(without_places(whole.model_dump_json(by_alias=True), folder))
    _write_report(bundle, report)
    return _put_in_place(bundle, folder / BUNDLE)


def _write_report(bundle: Path, report: AcceptanceReport) -> None:
    write_model(bundle / ACCEPTANCE_FILE, report)
    write_atomically(bundle / "acceptance.md", as_markdown(report))
    write_atomically(bundle / "acceptance.html", as_page(report))


def _put_in_place(made: Path, target: Path) -> Path:
    """Have a folder that is whole in the place of another one: who is killed meanwhile leaves one of them, or none."""
    _remove(target)
    with storage_errors(target, "written"):
        made.rename(target)
    return target


def _remove(folder: Path) -> None:
    with storage_errors(folder, "replaced"):
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        elif folder.exists():
            shutil.rmtree(folder)


def _runs_in(folder: Path) -> list[Path]:
    """The runs of an acceptance's folder; `latest` is one of them by another name, the bundle is made of them."""
    found = (path.parent for path in sorted(folder.glob("*/run.json")))
    return [run for run in found if run.name not in (BUNDLE, _MAKING) and not run.is_symlink()]


def without_places(text: str, folder: Path) -> str:
    """Take the folders of this machine out of what is to be committed: the acceptance's, the cache's, the user's."""
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises where there is none
    places = {str(folder.resolve()): "acceptance", str(folder): "acceptance", str(cache_folder()): "cache", home: "~"}
    for place in sorted(places, key=len, reverse=True):
        if Path(place).is_absolute() and place != "/":  # which is the home of some containers' users
            # before it may stand a line's end as JSON writes it, after it the point of a sentence
            text = re.sub(rf"((?<![\w.~-])|(?<=\\[nrt])){re.escape(place)}(?![\w-]|\.\w)", places[place], text)
    return text


def _copy_run(run: Run, target: Path) -> None:
    """Copy what a run holds that can be judged again, and its tables; without the folders of this machine."""
    files = [run.folder / "run.json", *run.folder.glob("compatibility.*"), *run.folder.glob("cells/**/*.json")]
    for path in sorted(files):
        text = without_places(read_bytes(path).decode("utf-8", errors="replace"), run.folder.parent)
        write_atomically(target / path.relative_to(run.folder), text)


def _end_of(log: Path) -> str:
    with storage_errors(log, "read"):
        return read_left_file(log, _LOG_BYTES, end_only=True).decode("utf-8", errors="replace")


def environment_of(cell: CellResult) -> dict[str, Any]:
    """What a cell ran in: packages, interpreter, driver, and the image with what it was built on."""
    provenance = cell.provenance
    names = (
        *(
            "torch",
            "torch_git",
            "cuda",
            "gpu",
            "gpu_architecture",
            "driver",
            "python",
            "toto_ts",
            "packages",
            "compiler",
        ),
        *("os", "cpu", "cores", "runtime", "lock", "image", "base_image", "base_used", "base_digest"),
        *("base_is_stand_in", "source_hash"),
    )
    return {name: getattr(provenance, name) for name in names}


# What can be read


def as_markdown(report: AcceptanceReport) -> str:
    """Tell steps and claims in Markdown."""
    about = report.campaign.about
    gpus = _plain(", ".join(about.gpus)) or "no GPU"
    title = "# Acceptance on a GPU" if not report.rehearsal else "# Rehearsal of the acceptance on a GPU"
    claims = [[one.ended.value, one.claim, one.predicted, one.by, one.found] for one in report.claims]
    parts = [
        title,
        f"**{report.warning}**" if report.warning else "",
        f"{gpus}; {', '.join(about.environments)}; begun {report.campaign.started}",
        *(f"Left out: {name}: {_plain(why)}" for name, why in report.campaign.left_out.items()),
        "## Steps",
        *(
            "\n".join([f"- **{step.value}**: {record.ended.value}", *(f"  - {_plain(line)}" for line in record.lines)])
            for step, record in report.campaign.steps.items()
        ),
        "## What was only predicted before",
        tabulate(
            [[_plain(str(value)).replace("|", "\\|") for value in row] for row in claims],
            ["held?", "claim", "predicted", "by", "found"],
            tablefmt="github",
            disable_numparse=True,
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _plain(text: str) -> str:
    """One line, without what Markdown or HTML would read as its own."""
    return " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1c2430; }
table { border-collapse: collapse; width: 100%; } td, th { border: 1px solid #d5dae2; padding: .4rem .6rem; }
td, th { text-align: left; vertical-align: top; } .broken { background: #fbe3e4; } .held { background: #e2f4e6; }
.warning { background: #b3261e; color: #fff; padding: .8rem 1rem; font-weight: 600; }
</style></head><body>
<h1>{{ title }}</h1>
{% if report.warning %}<p class="warning">{{ report.warning }}</p>{% endif %}
<p>{{ about.gpus | join(", ") or "no GPU" }}; {{ about.environments | join(", ") }};
begun {{ report.campaign.started }}</p>
{% for name, why in report.campaign.left_out.items() %}<p>Left out: {{ name }}: {{ why }}</p>{% endfor %}
<p><a href="compatibility.html">The production check</a></p>
<h2>What was only predicted before</h2>
<table><tr><th>held?</th><th>claim</th><th>predicted</th><th>by</th><th>found</th></tr>
{% for one in report.claims %}<tr class="{{ one.ended.name | lower }}">
<td>{{ one.ended.value }}</td><td>{{ one.claim }}</td>
<td>{{ one.predicted }}</td><td>{{ one.by }}</td><td>{{ one.found }}</td></tr>{% endfor %}</table>
<h2>Steps</h2>
{% for step, record in report.campaign.steps.items() %}<h3>{{ step.value }}: {{ record.ended.value }}</h3>
<ul>{% for line in record.lines %}<li>{{ line }}</li>{% endfor %}</ul>{% endfor %}
</body></html>
"""


def as_page(report: AcceptanceReport) -> str:
    """Tell the same as one HTML file; everything in it is escaped."""
    environment = Environment(loader=DictLoader({"page": _PAGE}), autoescape=True, undefined=StrictUndefined)
    title = "Rehearsal of the acceptance on a GPU" if report.rehearsal else "Acceptance on a GPU"
    return environment.get_template("page").render(report=report, about=report.campaign.about, title=title)


# What can be committed


def why_not_publishable(bundle: Path) -> Iterator[str]:
    """Say everything that keeps a bundle from being shown as what a GPU did."""
    if not (bundle / ACCEPTANCE_FILE).exists():
        yield f"{ACCEPTANCE_FILE} is missing"
        return
    if foreign := [str(path.relative_to(bundle)) for path in _foreign_entries(bundle)]:
        # what a link leads to would be committed
        yield f"it holds what no bundle does: {', '.join(foreign)}"
        return
    report = read_model(bundle / ACCEPTANCE_FILE, AcceptanceReport)
    if report.rehearsal or report.campaign.about.rehearsal:
        yield "it is a rehearsal: no GPU took part"
    if not report.campaign.is_finished:
        yield "not every step of it has ended"
    if not report.claims:
        yield "it has no claims"
    missing = False
    for name in ("", DEVICE, LOWERING, *(one.cache for one in sabotages.ALL)):
        if not (bundle / name / "run.json").exists():
            yield f"the run {name or PRODUCTION_CHECK} is missing"
            missing = True
            continue
        run = load_run(bundle / name)
        if run.unfinished:
            yield f"{name or PRODUCTION_CHECK}: cells without a result: {', '.join(run.unfinished)}"
        if name != LOWERING:
            yield from (f"{cell.cell}: {why}" for cell in run.cells if (why := why_not_of_a_gpu(cell)))
    if not missing:
        yield from _told_without_evidence(report, _told_anew(bundle, report))


def _foreign_entries(bundle: Path) -> Iterator[Path]:
    """Find what is no folder and none of the kinds of file that a bundle is made of."""
    for path in sorted(bundle.rglob("*")):
        is_plain = path.is_file() and path.suffix in (".json", ".md", ".html", ".log")
        if path.is_symlink() or not (is_plain or path.is_dir()):
            yield path


def _told_anew(bundle: Path, report: AcceptanceReport) -> AcceptanceReport:
    """Tell steps and claims by a bundle's own runs: what it says of them is a file that somebody may have changed."""
    campaign = report.campaign
    steps = dict(campaign.steps)
    for step, record in campaign.steps.items():
        if found := told_by_runs(step, bundle, rehearsal=report.rehearsal, production=""):
            steps[step] = record.model_copy(update={"ended": found[0], "lines": tuple(found[1])})
    told = {claim.claim: claim for claim in report.claims}
    claims = [
        # what the interpreter predicted is in a run beside it
        claim.model_copy(update={"predicted": told[claim.claim].predicted})
        if INTERPRETED_RUN in claim.by and claim.claim in told
        else claim
        for claim in claims_of(evidence_in(bundle, campaign, production=""))
    ]
    if StepName.CLAIMS in steps:
        steps[StepName.CLAIMS] = steps[StepName.CLAIMS].model_copy(update=as_a_step(claims))
    campaign = campaign.model_copy(update={"steps": steps})
    return report.model_copy(update={"campaign": campaign, "claims": tuple(claims)})


def _told_without_evidence(told: AcceptanceReport, found: AcceptanceReport) -> Iterator[str]:
    before, now = _endings(told), _endings(found)
    for what in dict.fromkeys((*before, *now)):
        if before.get(what) is not now.get(what):
            was, is_now = (one[what].value if what in one else "not there" for one in (before, now))
            yield f"{what} is told as {was}, by its runs it is {is_now}"


def _endings(report: AcceptanceReport) -> dict[str, Ended]:
    steps = {f"the step {step.value!r}": record.ended for step, record in report.campaign.steps.items()}
    return {f"the claim {claim.claim!r}": claim.ended for claim in report.claims} | steps


def why_not_of_a_gpu(cell: CellResult) -> str:
    """Say why a cell is no evidence of a GPU; '' if it is."""
    if cell.request.device is not Device.CUDA or cell.request.lower_only:
        return "it was not asked to run on a GPU"
    return "" if cell.provenance.gpu and cell.provenance.driver else "it saw no GPU"


def publish_bundle(bundle: Path, results: Path) -> Path:
    """Copy a bundle to results/reference/cuda; anything but evidence of a GPU is refused."""
    reasons = list(why_not_publishable(bundle))
    if reasons:
        raise RefusedError(
            f"{bundle}: not published as {results / PUBLISHED}: {'; '.join(reasons)}",
            hint="run `toto-compat gpu-acceptance` to its end on a machine with a GPU",
        )
    target = results / PUBLISHED
    made = target.with_name(f".{target.name}")
    _remove(made)
    with storage_errors(target, "written"):
        shutil.copytree(bundle, made)
    _write_report(made, _told_anew(made, read_model(made / ACCEPTANCE_FILE, AcceptanceReport)))
    return _put_in_place(made, target)


def exit_of(claims: Sequence[Claim], campaign: Campaign) -> Ended:
    """The worst of steps and claims."""
    found = {campaign.ended, *(claim.ended for claim in claims)}
    return next((one for one in (Ended.BROKEN, Ended.NOT_SHOWN) if one in found), Ended.HELD)
