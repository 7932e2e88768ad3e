"""The tests here share one connection to the engine."""

from tests.environments.engine_client import client

__all__ = ["client"]
