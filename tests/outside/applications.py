"""Train ten packages that use Lightning, under `ddp` and under our strategies, and print a table.

    python tests/outside/applications.py [NAME ...]

The first run makes a virtual environment in `build/applications`, some minutes. A package that
cannot be installed or imported is named with the reason. Every fit is a process of its own that
imports the package first and then `lightning_commfree`, so the package decides between
`lightning.pytorch` and `pytorch_lightning`. Two forked CPU ranks train on small synthetic data.

Distributed Lion votes with no other optimizer, and few packages let their user choose one. So the
table's Lion is a strategy that replaces a package's optimizers (`register_strategies`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build/applications"
PYTHON = PLACE / "venv/bin/python"
STRATEGIES = ("ddp", "diloco", "lion", "domino")
STEPS = 120  # of the optimizer, where a package lets us choose
Outcome = dict[str, Any]


def register_strategies() -> None:
    """Register our strategies under names with "ddp" in them: some packages look for that."""
    from lightning_commfree import (
        DistributedLion,
        DistributedLionStrategy,
        DominoTPStrategy,
        StreamingDiLoCoStrategy,
    )
    from lightning_commfree.host import StrategyRegistry

    class LionForAny(DistributedLionStrategy):
        """Votes with a `DistributedLion` in place of each optimizer that a package has made."""

        def setup_optimizers(self, trainer: Any) -> None:
            super().setup_optimizers(trainer)
            replaced = {made: lion_like(made) for made in self.optimizers}
            self.optimizers = list(replaced.values())
            for scheduler in (config.scheduler for config in self.lr_scheduler_configs):
                scheduler.optimizer = replaced[scheduler.optimizer]

    def lion_like(made: Any) -> DistributedLion:
        """Return Lion with the same parameters and learning rates: these fits are short."""
        names = ("params", "lr", "initial_lr", "weight_decay")
        groups = [{n: group[n] for n in names if n in group} for group in made.param_groups]
        return DistributedLion(groups, lr=1e-3)

    diloco = {"sync_every": 10, "num_fragments": 2, "fragment_pattern": "balanced"}
    for name, kind, settings in (
        ("diloco", StreamingDiLoCoStrategy, diloco),
        ("lion", LionForAny, {}),
        ("domino", DominoTPStrategy, {}),
    ):
        StrategyRegistry.register(
            f"{name}_ddp_fork", kind, override=True, start_method="fork", **settings
        )


def trainer_for(strategy: str) -> dict[str, Any]:
    """Return arguments for the Trainer. Call it when the package is imported."""
    register_strategies()
    quiet = ("enable_progress_bar", "enable_model_summary", "logger")
    name = "ddp_fork" if strategy == "ddp" else f"{strategy}_ddp_fork"
    return {"accelerator": "cpu", "devices": 2, "strategy": name, **dict.fromkeys(quiet, False)}


def alone() -> dict[str, Any]:
    """Return arguments for a Trainer that predicts in this process."""
    return {**trainer_for("ddp"), "devices": 1, "strategy": "auto"}


def resume(fit: Callable[[list[Any], str | None], Any]) -> tuple[Any, str]:
    """Fit, resume from the middle, and compare the weights.

    Args:
        fit: trains a new LightningModule with these callbacks, from this checkpoint, and returns
            it.

    Returns:
        The module of the first fit, and how its weights compare with the resumed one's.
    """
    import torch

    from lightning_commfree.host import pl

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == STEPS // 2:
                trainer.save_checkpoint(path)

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/middle.ckpt"
        straight, resumed = fit([Save()], None), fit([], path)
    pairs = zip(straight.parameters(), resumed.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    return straight, "exact" if same else "ran"


def fit_and_resume(make: Callable[[], Any], loader: Any, strategy: str, **more: Any) -> Outcome:
    """Fit `make()` on the data of `loader`, and resume it; `more` are arguments of the Trainer."""
    from lightning_commfree.host import pl

    def fit(callbacks: list[Any], path: str | None) -> Any:
        pl.seed_everything(1)
        trainer = pl.Trainer(
            **trainer_for(strategy),
            max_steps=STEPS,
            enable_checkpointing=False,
            callbacks=callbacks,
            **more,
        )
        module = make()
        # checkpoints of some packages hold more than tensors
        trainer.fit(module, loader, ckpt_path=path, weights_only=False)
        return module

    module, resumed = resume(fit)
    return {"module": module, "resume": resumed}


# -- the packages; each returns its metric, and whether a resumed fit ends with the same weights


def darts(strategy: str) -> Outcome:
    """Forecast a sine with TiDE; mean absolute error."""
    import numpy as np
    from darts import TimeSeries
    from darts.models import TiDEModel

    values = np.sin(np.arange(640) / 7).astype("float32")
    series = TimeSeries.from_values(values)
    model = TiDEModel(
        24, 12, hidden_size=16, n_epochs=8, batch_size=20, random_state=1,
        pl_trainer_kwargs=trainer_for(strategy),
    )  # fmt: skip
    model.fit(series[:-12])
    from lightning_commfree.host import pl

    forecast = model.predict(12, trainer=pl.Trainer(**alone()))
    return {"metric": float(abs(forecast.values()[:, 0] - values[-12:]).mean())}


def neuralforecast(strategy: str) -> Outcome:
    """Forecast a sine with NHITS; mean absolute error."""
    import numpy as np
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS

    values = np.sin(np.arange(612) / 7)
    table = {"unique_id": "a", "ds": pd.date_range("2020", periods=612, freq="D"), "y": values}
    data = pd.DataFrame(table)
    model = NHITS(
        h=12, input_size=24, max_steps=STEPS, random_seed=1, mlp_units=3 * [[16, 16]],
        **trainer_for(strategy),
    )  # fmt: skip
    forecast = NeuralForecast([model], freq="D")
    forecast.fit(data[:-12])
    for fitted in forecast.models:  # it would predict with the Trainer of the fit
        fitted.trainer_kwargs.update(alone())
    return {"metric": float(abs(forecast.predict()["NHITS"].to_numpy() - values[-12:]).mean())}


def rectools(strategy: str) -> Outcome:
    """Recommend the next item of a cycle with SASRec; share of hits among the first three."""
    import numpy as np
    import pandas as pd
    from rectools import Columns
    from rectools.dataset import Dataset
    from rectools.models import SASRecModel

    users, length, items = 80, 12, 20
    start = np.random.default_rng(0).integers(items, size=users)
    table = {
        Columns.User: np.repeat(np.arange(users), length),
        Columns.Item: ((start[:, None] + np.arange(length)) % items).reshape(-1),
        Columns.Weight: 1,
        Columns.Datetime: np.tile(pd.date_range("2020", periods=length), users),
    }
    dataset = Dataset.construct(pd.DataFrame(table))
    arguments = trainer_for(strategy)
    from lightning_commfree.host import pl

    pl.seed_everything(1)
    model = SASRecModel(
        n_factors=16, n_blocks=1, n_heads=1, session_max_len=10, batch_size=8, lr=0.01,
        get_trainer_func=lambda: pl.Trainer(max_steps=STEPS, **arguments),
    )  # fmt: skip
    model.fit(dataset)
    found = model.recommend(np.arange(users), dataset, k=3, filter_viewed=True)
    follows = (start[found[Columns.User]] + length) % items
    return {"metric": float((found[Columns.Item].to_numpy() == follows).sum() / users)}


def lifestream(strategy: str) -> Outcome:
    """Tell sequences apart with CoLES; its contrastive loss on the training data."""
    import numpy as np
    import torch
    from ptls.data_load.datasets import MemoryMapDataset
    from ptls.frames import PtlsDataModule
    from ptls.frames.coles import ColesDataset, CoLESModule
    from ptls.frames.coles.split_strategy import SampleSlices
    from ptls.nn import RnnSeqEncoder, TrxEncoder

    generator = np.random.default_rng(0)
    rows = []
    for user in range(64):
        codes = torch.from_numpy(generator.integers(1 + user % 8, 4 + user % 8, size=60))
        rows.append({"event_time": torch.arange(60), "code": codes})

    def make() -> Any:
        encoder = RnnSeqEncoder(
            trx_encoder=TrxEncoder(embeddings={"code": {"in": 16, "out": 8}}),
            hidden_size=16,
            type="gru",
        )
        return CoLESModule(
            seq_encoder=encoder,
            optimizer_partial=partial(torch.optim.Adam, lr=0.003),
            lr_scheduler_partial=partial(torch.optim.lr_scheduler.StepLR, step_size=30, gamma=0.9),
        )

    dataset = ColesDataset(MemoryMapDataset(rows), SampleSlices(3, 10, 25))
    loader = PtlsDataModule(train_data=dataset, train_batch_size=16).train_dataloader()
    trainer_for(strategy)
    outcome = fit_and_resume(make, loader, strategy, max_epochs=-1)
    torch.manual_seed(2)
    losses = [outcome["module"].training_step(batch, 0).item() for batch in loader]
    return {"metric": float(np.mean(losses)), "resume": outcome["resume"]}


def pytorch_tabular(strategy: str) -> Outcome:
    """Fit a small table with a category embedding; mean squared error."""
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    data, names = table()
    arguments = trainer_for(strategy)
    trainer = TrainerConfig(
        accelerator="cpu", devices=2, max_epochs=8, batch_size=16, seed=1, progress_bar="none",
        checkpoints=None, early_stopping=None, load_best=False,
        trainer_kwargs={"strategy": arguments["strategy"], "enable_model_summary": False},
    )  # fmt: skip
    model = TabularModel(
        data_config=DataConfig(target=["y"], continuous_cols=names),
        model_config=CategoryEmbeddingModelConfig(
            task="regression", layers="16-16", learning_rate=0.01
        ),
        optimizer_config=OptimizerConfig(),
        trainer_config=trainer,
        verbose=False,
        suppress_lightning_logger=True,
    )
    model.fit(train=data, validation=data)
    error = model.predict(data).iloc[:, 0].to_numpy() - data["y"].to_numpy()
    return {"metric": float((error**2).mean())}


def pytorch_forecasting(strategy: str) -> Outcome:
    """Forecast a sine with N-BEATS; mean absolute error."""
    import numpy as np
    import pandas as pd
    from pytorch_forecasting import NBeats, TimeSeriesDataSet

    table = {"t": np.arange(600), "group": "a", "y": np.sin(np.arange(600) / 7)}
    data = TimeSeriesDataSet(
        pd.DataFrame(table), time_idx="t", target="y", group_ids=["group"],
        time_varying_unknown_reals=["y"], max_encoder_length=24, max_prediction_length=12,
    )  # fmt: skip
    loader = data.to_dataloader(train=True, batch_size=16, num_workers=0)
    make = partial(
        NBeats.from_dataset, data, widths=[16, 16], learning_rate=0.01, backcast_loss_ratio=0.1,
        log_interval=-1, weight_decay=0.0,
    )  # fmt: skip
    outcome = fit_and_resume(make, loader, strategy)
    checked = data.to_dataloader(train=False, batch_size=64, num_workers=0)
    found = outcome["module"].predict(checked, return_y=True, trainer_kwargs=alone())
    return {
        "metric": float((found.output - found.y[0]).abs().mean()),
        "resume": outcome["resume"],
    }


def scvi(strategy: str) -> Outcome:
    """Fit counts of cells with a variational autoencoder; evidence lower bound."""
    import anndata
    import numpy as np
    import scvi as package

    arguments = trainer_for(strategy)
    if strategy == "ddp":
        arguments["strategy"] = "ddp_fork_find_unused_parameters_true"
    generator = np.random.default_rng(0)
    rates = generator.gamma(1.0, 2.0, size=(4, 30))[np.arange(400) % 4]
    data = anndata.AnnData(generator.poisson(rates).astype("float32"))
    package.model.SCVI.setup_anndata(data)
    models = []

    def fit(callbacks: list[Any], path: str | None) -> Any:
        package.settings.seed = 1
        models.append(package.model.SCVI(data, n_hidden=16, n_latent=4))
        models[-1].train(
            max_epochs=10, batch_size=16, train_size=1.0, plan_kwargs={"lr": 0.01},
            callbacks=callbacks, ckpt_path=path, **arguments,
        )  # fmt: skip
        return models[-1].module

    _, resumed = resume(fit)
    return {"metric": float(models[0].get_elbo(data)), "resume": resumed}


def chemprop(strategy: str) -> Outcome:
    """Predict the number of atoms of a molecule; mean squared error."""
    import torch
    from chemprop import data, models, nn

    smiles = ["C" * n + tail for n in range(1, 25) for tail in ("O", "N", "Cl", "OC")]
    sizes = [[float(len(s.replace("Cl", "X"))) / 10] for s in smiles]
    points = [data.MoleculeDatapoint.from_smi(s, y) for s, y in zip(smiles, sizes, strict=True)]
    loader = data.build_dataloader(data.MoleculeDataset(points), batch_size=8)

    def make() -> Any:
        message = nn.BondMessagePassing(d_h=16, depth=2)
        network = nn.RegressionFFN(input_dim=16, hidden_dim=16)
        return models.MPNN(message, nn.SumAggregation(), network, batch_norm=False, init_lr=1e-3)

    outcome = fit_and_resume(make, loader, strategy, max_epochs=-1)
    module = outcome["module"].eval()
    with torch.no_grad():
        errors = [(module(batch.bmg) - batch.Y).square() for batch in loader]
    return {"metric": float(torch.cat(errors).mean()), "resume": outcome["resume"]}


def gluonts(strategy: str) -> Outcome:
    """Forecast a sine with a feed-forward network; mean absolute error."""
    import numpy as np
    import pandas as pd
    from gluonts.dataset.common import ListDataset
    from gluonts.torch import SimpleFeedForwardEstimator

    arguments = trainer_for(strategy)
    from lightning_commfree.host import pl

    values = np.sin(np.arange(612) / 7)
    data = ListDataset([{"start": pd.Period("2020", "D"), "target": values[:-12]}], freq="D")
    outputs = []

    def fit(callbacks: list[Any], path: str | None) -> Any:
        pl.seed_everything(1)
        estimator = SimpleFeedForwardEstimator(
            12, context_length=24, hidden_dimensions=[16], batch_size=16, num_batches_per_epoch=15,
            trainer_kwargs={"max_epochs": 8, "callbacks": callbacks, **arguments},
        )  # fmt: skip
        outputs.append(estimator.train_model(data, ckpt_path=path))
        return outputs[-1].trainer.lightning_module

    _, resumed = resume(fit)
    (forecast,) = outputs[0].predictor.predict(data)
    error = float(abs(forecast.mean - values[-12:]).mean())
    return {"metric": error, "resume": resumed}


def deeptab(strategy: str) -> Outcome:
    """Fit a small table with a multilayer perceptron; mean squared error."""
    from deeptab.models import MLPRegressor

    data, names = table()
    arguments = trainer_for(strategy)
    model = MLPRegressor()
    model.fit(
        data[names], data["y"].to_numpy(), max_epochs=8, batch_size=16, random_state=1, **arguments
    )
    error = model.predict(data[names], device="cpu").reshape(-1) - data["y"].to_numpy()
    return {"metric": float((error**2).mean())}


def table() -> tuple[Any, list[str]]:
    """Return a table of 240 rows with a column "y", and the names of its other columns."""
    import numpy as np
    import pandas as pd

    x = np.random.default_rng(0).normal(size=(240, 4)).astype("float32")
    names = ["a", "b", "c", "d"]
    data = pd.DataFrame(x, columns=names)
    return data.assign(y=np.sin(x[:, 0]) + x[:, 1] * x[:, 2]), names


# name: the requirement, what the metric is, and the function
PACKAGES: dict[str, tuple[str, str, Callable[[str], Outcome]]] = {
    "darts": ("darts", "error", darts),
    "neuralforecast": ("neuralforecast", "error", neuralforecast),
    "rectools": ("rectools", "hits", rectools),
    "pytorch-lifestream": ("pytorch-lifestream", "loss", lifestream),
    "pytorch_tabular": ("pytorch-tabular", "squared error", pytorch_tabular),
    "pytorch-forecasting": ("pytorch-forecasting", "error", pytorch_forecasting),
    "scvi-tools": ("scvi-tools", "ELBO", scvi),
    "chemprop": ("chemprop", "squared error", chemprop),
    "gluonts": ("gluonts[torch]", "error", gluonts),
    "deeptab": ("deeptab", "squared error", deeptab),
}


def make_environment() -> None:
    """Install all packages with this project's pins of torch and Lightning."""
    if (PLACE / "done").exists():
        return
    print(f"Making {PLACE}: some minutes, once.", flush=True)
    PLACE.mkdir(parents=True, exist_ok=True)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = ("torch", "lightning", "pytorch-lightning", "lightning-utilities")
    pins = [line for line in lines if line.partition("==")[0] in pinned]
    (PLACE / "pins.txt").write_text("\n".join(pins))
    # rectools still asks for numpy below 2, and deeptab for 2; deeptab for an older torch
    torch = next(line for line in pins if line.startswith("torch=="))
    (PLACE / "overrides.txt").write_text(f"numpy>=1.26\n{torch}\n")
    subprocess.run([sys.executable, "-m", "venv", PLACE / "venv"], check=True)
    # torch with pip, whose configuration may name an index of CPU builds; the rest with uv, which
    # can override requirements
    subprocess.run([PYTHON, "-m", "pip", "install", "-q", "uv", torch], check=True)
    uv = [PLACE / "venv/bin/uv", "pip", "install", "-q", "--python", PYTHON]
    options = ["-c", PLACE / "pins.txt", "--override", PLACE / "overrides.txt"]
    for requirement, _, _ in PACKAGES.values():
        done = subprocess.run([*uv, *options, requirement, torch], check=False)
        if done.returncode:
            print(f"{requirement} cannot be installed here, see above.", flush=True)
    subprocess.run([*uv, *options, "-e", ROOT], check=True)
    (PLACE / "done").touch()


def run_apart(name: str) -> dict[str, Outcome]:
    """Train a package in a process of its own, under each strategy."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("COMMFREE_HOST", None)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [PYTHON, __file__, "--in-process", name],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    (PLACE / f"{name}.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        return dict.fromkeys(STRATEGIES, {"error": f"failed, see {PLACE / name}.log"})
    outcomes: dict[str, Outcome] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


def run_here(name: str) -> dict[str, Outcome]:
    """Train a package under each strategy; an exception is the outcome "error"."""
    outcomes = {}
    for strategy in STRATEGIES:
        try:
            outcome = PACKAGES[name][2](strategy)
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            outcome = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"}
            if "found no model in" in str(error):  # of transformers, as Domino needs
                outcome = {"error": "refused"}
        outcome.pop("module", None)
        from lightning_commfree.host import HOST  # chosen when the package was imported

        outcomes[strategy] = {"host": HOST, **outcome}
    return outcomes


def show(name: str, measure: str, outcomes: dict[str, Outcome]) -> str:
    """Return a row of the table."""
    hosts = (outcome["host"] for outcome in outcomes.values() if "host" in outcome)
    cells = [name, next(hosts, "?"), measure]
    cells += [f"{o['metric']:.3g}" if "metric" in o else o["error"] for o in outcomes.values()]
    cells += [outcomes[strategy].get("resume", "") for strategy in STRATEGIES[:3]]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run the packages named on the command line, or all of them."""
    if sys.argv[1:2] == ["--in-process"]:
        warnings.filterwarnings("ignore")
        print(json.dumps(run_here(sys.argv[2])))
        return
    make_environment()
    print(
        f"| package | imports | metric | {' | '.join(STRATEGIES)} | resume: ddp | diloco | lion |"
    )
    print("|---" * 10 + "|")
    for name in sys.argv[1:] or PACKAGES:
        print(show(name, PACKAGES[name][1], run_apart(name)), flush=True)


if __name__ == "__main__":
    main()
