"""A base image says of itself whether it is the one that was asked for."""

import pytest

from toto_compat.environments.base_image import BaseImage

OFFLINE = "toto-compat-base:bookworm"


@pytest.mark.parametrize(
    ("asked", "reference", "stand_in"),
    [
        ("python:3.12-slim", OFFLINE, True),
        ("python:3.12-slim", "python@sha256:1", False),
        (OFFLINE, OFFLINE, False),
    ],
    ids=["for want of a registry", "pinned", "asked for by its name"],
)
def test_a_stand_in_is_what_nobody_asked_for(asked: str, reference: str, stand_in: bool) -> None:
    assert BaseImage(asked, reference, "sha256:1", complete=True).is_stand_in is stand_in
