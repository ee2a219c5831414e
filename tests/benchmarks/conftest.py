"""Fixtures shared with the tests of the recipes."""

from tests.recipes.conftest import compose_config, quiet_trainer

__all__ = ["compose_config", "quiet_trainer"]
