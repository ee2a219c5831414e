"""Which values are legal where a signature cannot say it: ranges, and keys that are no parameters.

A path may have `*`, and the name of a primary configuration before it. The first line that fits
holds, beside the type of the target's parameter. What depends on two keys (`n_embd` and `n_head`)
their readers check.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Within = Annotated[float, Field(gt=0, lt=1)]
AtLeastTwo = Annotated[int, Field(ge=2)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # numpy's
Backend = Literal["gloo", "nccl", "mpi", "ucc", None]
Devices = Literal[-1] | PositiveInt | Annotated[str, Field(pattern=r"^(auto|-1|\d+(,\d*)*)$")]

RANGES: dict[str, Any] = {
    # the roots of conf/pretrain.yaml and conf/finetune.yaml
    "seed": Seed,
    "token_budget": int
    | Annotated[float, Field(gt=0, le=1e18)]
    | None,  # `settle_length` says more
    "gradient_checkpointing": bool,
    "compile": str | None,
    "check_memory": bool,
    "ckpt_path": str | None,
    "checkpoint_every_n_steps": NonNegativeInt,
    "run_dir": str,
    "cache_dir": str,
    "report": dict[str, Any],
    "report.prompt": str | None,
    "report.sample_tokens": NonNegativeInt,
    "report.evaluate_before": bool,
    "callbacks": list[dict[str, Any]],
    "logger": dict[str, Any],
    "lora": dict[str, Any] | None,
    "lora.r": PositiveInt,
    "lora.lora_alpha": PositiveInt,
    "lora.lora_dropout": BelowOne,
    # of conf/plan.yaml; the planner checks sizes against each other
    "step_time": PositiveFloat,
    "plan:bandwidth": Annotated[float, Field(gt=0, allow_inf_nan=True)],
    "num_replicas": PositiveInt,
    "replica_size": PositiveInt,
    "sync_every": PositiveInt,
    "num_fragments": PositiveInt | None,
    "overlap_steps": NonNegativeInt | str,
    "wire_dtype": str,
    "gradient_dtype": str,
    "targets": Annotated[list[Within], Field(min_length=1)],
    "advice_target": Within,
    "vocab_size": PositiveInt | None,
    "latency": NonNegativeFloat,
    "tokens_per_step": PositiveInt | None,
    # of conf/compare.yaml
    "strategies": list[str],
    "compare:bandwidth": str | None,
    "nodes": PositiveInt,
    "timeout_minutes": PositiveFloat | None,
    "overrides": dict[str, Any],
    "overrides.*": dict[str, Any] | None,
    # Lightning's Trainer
    "trainer.max_steps": int,  # `fit` says why it must be positive
    "trainer.max_epochs": Literal[-1] | PositiveInt | None,
    "trainer.accelerator": Literal["auto", "cpu", "gpu", "cuda", "mps", "tpu"],
    "trainer.devices": Devices | list[NonNegativeInt],
    "trainer.num_nodes": PositiveInt,
    "trainer.accumulate_grad_batches": PositiveInt,
    "trainer.gradient_clip_val": NonNegativeFloat | None,
    "trainer.val_check_interval": PositiveInt | Annotated[float, Field(gt=0, le=1)] | None,
    "trainer.check_val_every_n_epoch": PositiveInt | None,
    "trainer.num_sanity_val_steps": Annotated[int, Field(ge=-1)],
    "trainer.limit_*_batches": NonNegativeInt | Share,
    "trainer.log_every_n_steps": NonNegativeInt,
    # data and tokenizers
    "data.block_size": PositiveInt,
    "data.batch_size": PositiveInt,
    "data.num_workers": NonNegativeInt,
    "data.seed": Seed,
    "data.validation_fraction": Within,
    "data.corpus.num_states": AtLeastTwo,
    "data.corpus.*_characters": PositiveInt,
    "data.corpus.concentration": PositiveFloat,
    "data.corpus.seed": Seed,
    "data.corpus.validation_documents": PositiveInt,
    "data.corpus.max_documents": PositiveInt | None,
    "tokenizer.vocab_size": PositiveInt,
    # optimizers
    "optimizer.total_steps": int,
    "optimizer.lr": NonNegativeFloat,
    "optimizer.betas": tuple[BelowOne, BelowOne] | None,
    "optimizer.weight_decay": NonNegativeFloat,
    "optimizer.warmup_steps": NonNegativeInt | None,
    "optimizer.final_lr_fraction": Share,
    # strategies; theirs are checked by their constructors
    "strategy.timeout.*": Annotated[float, Field(gt=0, le=1e6)],
    "strategy.process_group_backend": Backend,
    # transformers' configs
    "model.n_layer": Annotated[int, Field(ge=1, le=10_000)],
    "model.num_hidden_layers": Annotated[int, Field(ge=1, le=10_000)],
    "model.*_pdrop": Share,
    "model.*dropout": Share,
    "model.initializer_range": NonNegativeFloat,
    "model.*_eps*": NonNegativeFloat,
}
