"""The freeze of production: what it pins is taken over, what it names and does not hold is told."""

from pathlib import Path

import pytest

from tests.repro.test_from_log import PRODUCTION, error_of, from_log
from toto_compat.errors import InputError
from toto_compat.repro.incident import Incident
from toto_compat.repro.production_freeze import read_freeze

FREEZE = "torch==2.9.0+cu128\ntoto-ts==0.2.0\n"


def with_freeze(tmp_path: Path, text: str) -> tuple[Incident, str]:
    (tmp_path / "freeze.txt").write_text(text, encoding="utf-8")
    incident, written, _ = from_log(PRODUCTION, tmp_path / "i.yaml", "--freeze", str(tmp_path / "freeze.txt"))
    return incident, written


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_freeze_of_any_shell_is_read(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "freeze.txt").write_bytes(FREEZE.replace("\n", "\r\n").encode(encoding))
    assert read_freeze(tmp_path / "freeze.txt").pinned == {"torch": "2.9.0+cu128", "toto-ts": "0.2.0"}


def test_packages_that_are_named_like_secrets_are_pinned_all_the_same(tmp_path: Path) -> None:
    incident, _ = with_freeze(tmp_path, f"{FREEZE}djangorestframework-api-key==3.0.0\nexpiring-token===3.0.0\n")
    assert incident.pins is not None
    assert {"djangorestframework-api-key==3.0.0", "expiring-token==3.0.0"} <= set(incident.pins.frozen)


def test_another_torch_than_the_freezes_comes_without_the_packages_of_that_one(tmp_path: Path) -> None:
    own = "nvidia-cudnn-cu12==9.10.2.21\nnvidia-cuda-runtime-cu12==12.8.90\ntriton==3.5.0\ntorchvision==0.24.0\n"
    (tmp_path / "freeze.txt").write_text(f"{FREEZE}numpy==2.1.3\ntorchmetrics==1.8.0\n{own}", encoding="utf-8")
    given = ("--freeze", str(tmp_path / "freeze.txt"))
    incident, text, _ = from_log(PRODUCTION, tmp_path / "i.yaml", *given, "--torch", "2.13.0")
    assert incident.pins is not None
    assert (incident.pins.torch, incident.pins.cuda) == ("2.13.0", "cu130")
    assert incident.pins.frozen == ("toto-ts==0.2.0", "numpy==2.1.3", "torchmetrics==1.8.0")
    assert "torch 2.9.0 of the freeze and 4 packages that go with it" in text
    assert "the freeze has a build for cu128; cu130 is that of" in text
    incident, _, _ = from_log(PRODUCTION, tmp_path / "j.yaml", *given, "--torch", "2.9.0")
    assert incident.pins is not None
    assert {"triton==3.5.0", "torch==2.9.0+cu128"} <= set(incident.pins.frozen)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("-e /srv/bot\n", "left out, since their lines name no release: bot"),
        ("-e git+https://u:hunter2hunter2@h\n", "left out, since their lines name no release: one that is not named"),
        ("bot @ file:///srv/bot\n", "left out, since their lines name no release: bot"),
    ],
)
def test_what_a_freeze_names_without_a_release_is_told(tmp_path: Path, lines: str, told: str) -> None:
    _, text = with_freeze(tmp_path, FREEZE + lines)
    assert told in text
    assert "hunter2" not in text


def test_a_build_that_cannot_be_had_is_told_and_not_replaced_in_silence(tmp_path: Path) -> None:
    _, text = with_freeze(tmp_path, FREEZE.replace("cu128", "rocm6.4"))
    assert "torch is a build for rocm6.4 there, and none can be had: cu128 is taken" in text
    assert "# unknown: how it is with torch's build for rocm6.4" in text


@pytest.mark.parametrize(
    ("freeze", "told"),
    [
        ("torch==2.9.0.post1\n", "torch 2.9.0.post1, which is no release"),
        ("torch==2.9\n", "torch 2.9, which is no release"),
        ("torch==1!2.9.0\n", "torch 1!2.9.0, which is no release"),
        (f"{FREEZE}torch==2.8.0\n", "freeze.txt:3: torch is 2.8.0 here and 2.9.0+cu128 above"),
    ],
)
def test_a_freeze_whose_torch_cannot_be_had_is_refused(tmp_path: Path, freeze: str, told: str) -> None:
    (tmp_path / "freeze.txt").write_text(freeze, encoding="utf-8")
    error = error_of(PRODUCTION, "--freeze", str(tmp_path / "freeze.txt"), "-o", str(tmp_path / "i.yaml"))
    assert isinstance(error, InputError)
    assert told in error.message


def test_what_a_freeze_names_and_does_not_hold_is_told(tmp_path: Path) -> None:
    lines = "-r base.txt\n--index-url https://u:hunter2@h/simple\ntorch==2.9.0+cu128\ntoto-ts==0.2.0\n"
    (tmp_path / "freeze.txt").write_text(lines, encoding="utf-8")
    _, text, printed = from_log(PRODUCTION, tmp_path / "i.yaml", "--freeze", str(tmp_path / "freeze.txt"))
    assert "unknown: what base.txt pins, which the freeze names and does not hold" in printed
    assert (
        "# options of pip in the freeze were passed over: -r base.txt, --index-url https://<redacted>@h/simple" in text
    )
    assert "hunter2" not in text + printed
