"""Pins of an incident's own become an environment; what cannot be had or contradicts itself is told with its place."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from toto_compat.contract.request import Environment
from toto_compat.errors import InputError
from toto_compat.matrix.load import load_matrix
from toto_compat.repro.command import repro_command
from toto_compat.repro.incident import load_incident
from toto_compat.repro.pins import Pins, is_pinned, pinned_environment
from toto_compat.repro.pins_index import check_pins_exist

ROOT = Path(__file__).parents[2]
INCIDENT = ROOT / "incidents" / "2025-10-30-recompile-limit.yaml"
MATRIX = load_matrix(ROOT / "matrix.yaml")
FREEZE = """\
# from the bot's host
einops==0.8.1
numpy==2.1.3
nvidia-cuda-runtime-cu12==12.8.90
pydantic==2.14.3
torch==2.9.0
toto-ts==0.2.0
torchvision==0.24.0+cu128
"""


def written(folder: Path, pins: str, freeze: str | None = None) -> Path:
    """The shipped incident with pins of its own, which begin in line `PINS`."""
    if freeze is not None:
        (folder / "freeze.txt").write_text(freeze, encoding="utf-8")
    text = INCIDENT.read_text(encoding="utf-8").replace("environment: torch-2.9.0-cu128\n", "")
    path = folder / "incident.yaml"
    path.write_text(f"pins:\n{pins}{text}", encoding="utf-8")
    return path


def environment_of(path: Path) -> tuple[str, Environment]:
    pins = load_incident(path).pins
    assert pins is not None
    return pinned_environment(pins, path.parent, MATRIX)


def test_pins_of_its_own_make_an_environment_with_a_name_of_its_own(tmp_path: Path) -> None:
    pins = '  torch: "2.10.0"\n  cuda: "12.8"\n  python: "3.13"\n  packages: {einops: "0.8.1"}\n'
    name, environment = environment_of(written(tmp_path, pins))
    assert name.startswith("torch-2.10.0-cu128-incident-")
    assert is_pinned(name) and not any(is_pinned(known) for known in MATRIX.environments)
    assert (environment.torch, environment.build, environment.python) == ("2.10.0", "cu128", "3.13")
    assert environment.pins == {"einops": "0.8.1"}
    assert environment.gpu_architectures == MATRIX.environments["torch-2.9.0-cu128"].gpu_architectures


def test_pins_that_are_those_of_an_environment_of_the_matrix_are_that_environment() -> None:
    known = MATRIX.environments["torch-2.9.0-cu128"]
    pins = Pins(torch="2.9.0", cuda="cu128", python="3.13", packages=known.pins)
    assert pinned_environment(pins, ROOT, MATRIX) == ("torch-2.9.0-cu128", known)


def test_two_incidents_with_other_pins_do_not_share_an_environment() -> None:
    names = {
        pinned_environment(Pins(torch="2.10.0", cuda="cpu", python="3.11", packages={"einops": one}), ROOT, MATRIX)[0]
        for one in ("0.7.0", "0.8.1")
    }
    assert len(names) == 2


def test_a_freeze_names_torch_its_build_toto_and_every_other_package(tmp_path: Path) -> None:
    _, environment = environment_of(written(tmp_path, '  python: "3.13"\n  freeze: freeze.txt\n', FREEZE))
    assert (environment.torch, environment.build, environment.toto_ts) == ("2.9.0", "cu128", "0.2.0")
    assert environment.pins["numpy"] == "2.1.3"
    assert environment.pins["torchvision"] == "0.24.0"  # the tag of torch's build is on PyTorch's own index alone
    assert "torch" not in environment.pins and "toto-ts" not in environment.pins


def test_a_freeze_may_stand_in_the_incident_itself(tmp_path: Path) -> None:
    lines = "".join(f"    - {line}\n" for line in ("torch==2.13.0+cpu", "toto-ts==0.2.0", "numpy==1.26.4"))
    _, environment = environment_of(written(tmp_path, f'  python: "3.11"\n  frozen:\n{lines}'))
    assert (environment.torch, environment.build) == ("2.13.0", "cpu")
    assert environment.index == MATRIX.environments["torch-2.13.0-cpu"].index


def test_a_package_of_the_freeze_can_be_left_out_whatever_its_line_is(tmp_path: Path) -> None:
    own = "-e git+https://me:secret@host/bot@0123#egg=Trading_Bot\nprivate @ file:///srv/private\n"
    pins = '  python: "3.13"\n  freeze: freeze.txt\n  leave_out: [trading-bot, private]\n'
    _, environment = environment_of(written(tmp_path, pins, FREEZE + own))
    assert "private" not in environment.pins


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-e git+https://me:secret@host/bot@0123#egg=bot", "not a release; leave the package out with pins.leave_out"),
        ("bot @ file:///srv/bot", "'bot @ file:///srv/bot' in freeze.txt:9"),
        ("numpy>=2", "'numpy>=2' in freeze.txt:9; accepted only this: it is no exact version"),
        ("scipy==1.*", "it is no exact version"),
        ("--index-url https://host/simple", "pip takes no such line"),
        ("Traceback (most recent call last):", "pip takes no such line"),
        ("scipy===not.a.version", "its version is none that pip knows"),
        ("numpy==1.26.4", "numpy 2.1.3 in freeze.txt:3 and 1.26.4 in freeze.txt:9; accepted one version of each"),
        ("pydantic-core==2.0\npydantic==1.10.0", "the cell itself needs it"),
        ("bot @ git+https://u:secret/y@h/bot.git", "not a release; leave the package out"),
        (f"bot @ git+https://u:secret{'x' * 120}@h/bot.git", "not a release; leave the package out"),
    ],
)
def test_a_line_that_no_environment_can_be_built_from_is_told_with_its_place(
    tmp_path: Path, line: str, said: str
) -> None:
    path = written(tmp_path, '  python: "3.13"\n  freeze: freeze.txt\n', FREEZE.replace("pydantic==2.14.3", "") + line)
    with pytest.raises(InputError, match=re.escape(said)) as caught:
        load_incident(path)
    assert f"{path}:3: pins.freeze: " in caught.value.message
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        (
            '  python: "3.13"\n  torch: "2.8.0"\n  freeze: freeze.txt\n',
            ":3: pins.torch: found '2.8.0', and 2.9.0 in fr",
        ),
        (
            '  python: "3.13"\n  cuda: "13.0"\n  freeze: freeze.txt\n',
            ":3: pins.cuda: found '13.0', and cu128 by the fr",
        ),
        (
            '  python: "3.13"\n  freeze: freeze.txt\n  packages: {numpy: "1.26.4"}\n',
            ":4: pins.packages.numpy: found '1.26.4', and 2.1.3 in freeze.txt:3",
        ),
        ('  python: "3.13"\n  freeze: other.txt\n', ":3: pins.freeze: found no file 'other.txt'"),
        ("  freeze: freeze.txt\n", "pins.python: found nothing; accepted Python minor version"),
        ('  python: "3.13"\n  torch: "2.9.0"\n', "pins.cuda: found nothing; accepted cpu, or the CUDA release"),
        ('  python: "3.13"\n  cuda: cpu\n', "pins.torch: found nothing; accepted one exact PyTorch release"),
        ('  python: "3.13"\n  torch: "2.9.0"\n  cuda: twelve\n', ":4: pins.cuda: found 'twelve'; accepted cpu, or a"),
        (
            '  python: "3.13"\n  torch: "2.9.0"\n  cuda: cpu\n  packages: {Torch: "2.9.0"}\n',
            "pins.packages.Torch: found a package; accepted it as the key pins.torch",
        ),
        (
            '  python: "3.13"\n  torch: "2.9.0"\n  cuda: cpu\n  packages: {scipy: newest}\n',
            "pins.packages.scipy: found 'newest'; accepted one exact version",
        ),
        (
            '  python: "3.13"\n  torch: "2.9.0"\n  cuda: cpu\nenvironment: torch-2.13.0-cpu\n',
            "pins: found pins beside environment 'torch-2.13.0-cpu'; accepted one of the two",
        ),
        (
            '  python: "3.13"\n  torch: "2.9.0"\n  cuda: cpu\n  packages: {"-fhttp://h/x": "1.0"}\n',
            "found no name of a package; accepted letters, digits",
        ),
        (
            '  python: "3.13"\n  cuda: cpu\n  frozen: ["torch==2.9.0.post1"]\n',
            "torch 2.9.0.post1 in pins.frozen:1; acc",
        ),
        ('  python: "3.13"\n  cuda: cpu\n  frozen: ["torch==2.9"]\n', "torch 2.9 in pins.frozen:1; accepted one exact"),
        ('  pyton: "3.13"\n', "did you mean python?"),
        (
            '  python: "3.13"\n  frozen: ["torch==2.9.0", "toto-ts==0.2.0", "nvidia-cuda-runtime==1.2.3"]\n',
            "pins.cuda: found nothing; accepted the freeze does not say it: cpu, or the CUDA release",
        ),
        (
            '  python: "3.13"\n  torch: "2.9.0"\n  cuda: cpu\n  toto_ts: ../no-such-fork\n',
            ":5: pins.toto_ts: found '../no-such-fork'",
        ),
        (
            '  python: "3.13"\n  torch: "2.9.0"\n  cuda: cpu\n  xformers: yes it is\n',
            ":5: pins.xformers: found 'yes it",
        ),
    ],
)
def test_pins_that_contradict_each_other_or_miss_something_are_told_with_line_and_key(
    tmp_path: Path, pins: str, said: str
) -> None:
    path = written(tmp_path, pins, FREEZE)
    with pytest.raises(InputError, match=re.escape(said)):
        load_incident(path)


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        (
            '  torch: "99.0.0"\n  cuda: cpu\n  python: "3.11"\n',
            ":2: pins.torch: found torch==99.0.0, of which the pack",
        ),
        (
            '  torch: "2.13.0"\n  cuda: cpu\n  python: "3.11"\n  packages:\n    einops: "0.7.0.1.2"\n',
            ":6: pins.packages.einops: found einops==0.7.0.1.2, of which the package index has no wheel",
        ),
    ],
)
def test_pins_that_do_not_exist_are_told_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pins: str, said: str
) -> None:
    monkeypatch.setenv("TOTO_COMPAT_CACHE", str(tmp_path / "cache"))
    path = written(tmp_path, pins)
    arguments = [str(path), "--runtime", "venv", "--device", "cpu", "--matrix", str(ROOT / "matrix.yaml")]
    run = CliRunner().invoke(repro_command, arguments)
    assert isinstance(run.exception, InputError), run.exception
    assert said in run.exception.message
    assert not (tmp_path / "cache" / "venvs").exists()


def test_pins_that_exist_are_not_complained_about(tmp_path: Path) -> None:
    environment = MATRIX.environments["torch-2.13.0-cpu"]
    pins = Pins(torch="2.13.0", cuda="cpu", python="3.11", packages=environment.pins)
    check_pins_exist(tmp_path / "incident.yaml", pins, environment)


DIGITS = "9" * 5000


@pytest.mark.parametrize(
    ("pins", "told"),
    [
        (f'  {{torch: "2.9.{DIGITS}", cuda: cpu, python: "3.13"}}\n', "pins.torch: found '2.9.999"),
        (
            f'  {{torch: "2.9.0", cuda: cpu, python: "3.13", packages: {{a: "{DIGITS}"}}}}\n',
            "pins.packages.a: found '999",
        ),
        (f'  {{torch: "2.9.0", cuda: cpu, python: "3.13", frozen: ["a=={DIGITS}"]}}\n', "none that pip knows"),
        (f'  {{torch: "2.9.0", cuda: cpu, python: "3.13", toto_ts: "{DIGITS}"}}\n', "pins.toto_ts: found '999"),
        (f'  {{torch: "2.9.0", cuda: cpu, python: "3.13", toto_ts: "./{"n" * 300}"}}\n', "File name too long"),
        (f'  {{torch: "2.9.0", cuda: cpu, python: "3.13", freeze: "{"n" * 300}"}}\n', "File name too long"),
    ],
)
def test_a_version_or_name_that_is_too_long_is_told_with_its_key(tmp_path: Path, pins: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        load_incident(written(tmp_path, pins))
    assert told in caught.value.message
