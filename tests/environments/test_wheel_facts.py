"""What a wheel's metadata says, also where it says odd things."""

import pytest

from toto_compat.environments.wheel_facts import facts_of


@pytest.mark.parametrize(
    ("requirement", "build"),
    [
        ("cuda-toolkit[cublas]==13.2.1", "cu132"),
        ("nvidia-cuda-runtime-cu12==12.8.90; platform_system == 'Linux'", "cu128"),
        ("cuda-toolkit==13.*", "cpu"),
        ("cuda-toolkit==13", "cpu"),
    ],
)
def test_cuda_is_told_by_a_whole_version_alone(requirement: str, build: str) -> None:
    assert facts_of(f"Version: 2.16.0\nRequires-Dist: {requirement}\n", "", "here").build == build


@pytest.mark.parametrize(("said", "build"), [("13.4", "cu134"), ("13.4.2", "cu134"), ("13", "cpu"), ("...", "cpu")])
def test_a_wheels_own_version_file_is_read_as_builds_are_named(said: str, build: str) -> None:
    assert facts_of("Version: 2.16.0\n", f"cuda: str = '{said}'\n", "here").build == build


def test_a_condition_that_nobody_can_decide_refuses_no_python() -> None:
    facts = facts_of('Version: 2.16.0\nRequires-Dist: triton; python_version ~= "abc"\n', "", "here")
    assert facts.compiles_on("3.12")
