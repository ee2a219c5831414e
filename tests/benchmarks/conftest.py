"""What the tests of the benchmarks share with those of the recipes."""

from tests.recipes.conftest import compose_config, quiet_trainer

__all__ = ["compose_config", "quiet_trainer"]
