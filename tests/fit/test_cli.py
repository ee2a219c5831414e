"""LightningCLI with a strategy's class path and arguments, as a YAML file has them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy

from tests.fit.models import Tiny


def configured(tmp_path: Any, class_path: str, **init_args: Any) -> DDPStrategy:
    strategy = {"class_path": class_path, "init_args": init_args}
    trainer = {"accelerator": "cpu", "devices": 2, "logger": False, "strategy": strategy}
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"trainer": trainer}))
    cli = LightningCLI(
        Tiny,
        run=False,
        args=[f"--config={file}"],
        save_config_callback=None,
        seed_everything_default=False,
    )
    made = cli.trainer.strategy
    assert isinstance(made, DDPStrategy)
    return made


@pytest.mark.parametrize(
    ("name", "init_args"),
    [
        ("StreamingDiLoCoStrategy", {"sync_every": 30, "overlap_steps": 3}),
        ("StreamingDiLoCoStrategy", {"replica_size": 2, "static_graph": True}),
        ("DistributedLionStrategy", {"vote": "average", "start_method": "fork"}),
        ("DominoTPStrategy", {"num_micro_batches": 4}),
    ],
)
def test_defaults_that_jsonargparse_passes_are_accepted(
    tmp_path: Any, name: str, init_args: dict[str, Any]
) -> None:
    """jsonargparse passes all of DDP's, with their defaults."""
    strategy = configured(tmp_path, f"lightning_commfree.{name}", **init_args)
    settings = vars(strategy.settings)  # type: ignore[attr-defined]
    for key in init_args.keys() & settings.keys():
        assert settings[key] == init_args[key]
    assert strategy._start_method == init_args.get("start_method", "popen")
    given = init_args.keys() - settings.keys() - {"start_method"}
    assert strategy._ddp_kwargs == {key: init_args[key] for key in given}


def test_an_unsupported_ddp_argument_is_refused(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    # a version of jsonargparse raises, another one prints and exits
    with pytest.raises((SystemExit, ValueError)) as caught:
        configured(
            tmp_path, "lightning_commfree.StreamingDiLoCoStrategy", find_unused_parameters=True
        )
    said = f"{caught.value}{capsys.readouterr().err}"
    assert "`StreamingDiLoCoStrategy` does not accept the argument `find_unused_parameters`" in said
