"""What the tests of the benchmarks share with those of the recipes: composed configurations."""

from tests.recipes.conftest import compose_config

__all__ = ["compose_config"]
