"""A budget of tokens decides the steps before anything reads them."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from recipes.training.length import apply_token_budget, count_ranks
from tests.recipes.conftest import CONF


@pytest.fixture
def composed():
    def make(*overrides: str) -> DictConfig:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("pretrain", ["run_dir=run", *overrides])

    return make


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["token_budget=204800"], 100),  # 2 ranks x 16 rows x 64 tokens
        (["token_budget=2.06e5"], 100),  # the budget is kept
        (["token_budget=204800", "trainer.accumulate_grad_batches=2"], 50),
        (["token_budget=204800", "trainer.num_nodes=5"], 20),
        (["token_budget=204800", "trainer.devices=auto"], 200),  # one process on a CPU
        (["token_budget=204800", "strategy=domino_tp"], 200),  # both ranks share a batch
        (
            [
                "token_budget=204800",
                "strategy=domino_tp",
                "trainer.devices=4",
                "strategy.tensor_parallel_size=2",
            ],
            100,
        ),
    ],
)
def test_steps_of_a_budget(composed, capsys, overrides, steps) -> None:
    cfg = composed(*overrides)
    apply_token_budget(cfg)
    assert cfg.trainer.max_steps == steps
    assert OmegaConf.to_container(cfg.optimizer, resolve=True)["total_steps"] == steps
    said = capsys.readouterr().out
    assert f": {steps} steps of " in said
    assert "trainer.max_steps=2400 is not used" in said


def test_without_a_budget_the_steps_stay(composed, capsys) -> None:
    cfg = composed("trainer.max_steps=17")
    apply_token_budget(cfg)
    assert cfg.trainer.max_steps == 17
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("budget", ["-5", "2000"])
def test_a_budget_below_one_step(composed, budget) -> None:
    with pytest.raises(
        ValueError, match=rf"token_budget={int(budget):,} is not .* 2,048 tokens a step \(2 shares"
    ):
        apply_token_budget(composed(f"token_budget={budget}"))


@pytest.mark.parametrize("budget", ["many", "1.5", "true"])
def test_a_budget_that_is_no_number_of_tokens(composed, budget) -> None:
    with pytest.raises(ValueError, match="must be a whole number of tokens"):
        apply_token_budget(composed(f"token_budget={budget}"))


def test_ranks_are_counted_by_lightning(composed) -> None:
    trainer = composed("trainer.devices=3", "trainer.num_nodes=2").trainer
    assert count_ranks(OmegaConf.to_container(trainer)) == (3, 2)
