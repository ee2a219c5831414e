"""Legal keys and values of the primary configurations in `conf/`, as pydantic models.

Sections with a `_target_` are only typed as `Object` here: `signatures` checks them against the
signature of the target. `RANGES` narrows signatures of other libraries that only say `int` or
`float`; signatures of this project have ranges in their annotations.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from recipes.configuration.ranges import Fraction, FractionBelowOne, InnerFraction, Seed


def _with_target(section: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(section.get("_target_"), str):
        raise ValueError("should name a class or function in `_target_`")
    return section


Object = Annotated[dict[str, Any], AfterValidator(_with_target)]


class Section(BaseModel):
    """A part of a configuration in which every key must be known."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,  # 3.7, "3" and true are not whole numbers
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        protected_namespaces=(),  # keys may begin with `model_`
    )


class Open(Section, extra="allow"):
    """A part with further keys that something else checks."""


class Report(Section):  # noqa: D101 - `recipes.training.report.RunReport` explains the keys
    prompt: str | None
    sample_tokens: NonNegativeInt
    evaluate_before: bool = False


class Lora(Open):
    """The keys of `conf/lora/default.yaml`; `peft.LoraConfig` checks any others."""

    r: PositiveInt
    lora_alpha: PositiveInt
    lora_dropout: FractionBelowOne
    target_modules: str | list[str]


class Pretrain(Section):  # noqa: D101 - `conf/pretrain.yaml` explains the keys, as for the next
    strategy: Object
    model: Object
    tokenizer: Object
    data: Object
    optimizer: Object
    trainer: Object
    logger: dict[str, Object]
    seed: Seed
    token_budget: int | Annotated[float, Field(gt=0, le=1e18)] | None = (
        None  # see `apply_token_budget`
    )
    gradient_checkpointing: bool
    compile: str | None
    check_memory: bool
    ckpt_path: str | None
    checkpoint_every_n_steps: NonNegativeInt
    run_dir: str
    cache_dir: str
    report: Report
    callbacks: dict[str, Object]
    print_config: bool

    @field_validator("compile")
    @classmethod
    def _is_backend(cls, name: str | None) -> str | None:
        if name is not None:
            import torch.compiler  # here: importing dynamo takes seconds

            backends = torch.compiler.list_backends()
            if name not in backends:
                raise ValueError(f"should be a backend of torch: {', '.join(backends)}")
        return name


class Finetune(Pretrain):  # noqa: D101
    lora: Lora | None


class Compare(Pretrain):  # noqa: D101
    strategies: list[str]
    bandwidth: str | None
    nodes: PositiveInt
    timeout_minutes: PositiveFloat | None
    overrides: dict[str, dict[str, Any] | None]


class PlanData(Section):  # noqa: D101
    block_size: PositiveInt


class Plan(Section):  # noqa: D101 - the planner checks sizes against each other
    model: Object
    step_time: PositiveFloat
    bandwidth: Annotated[float, Field(gt=0, allow_inf_nan=True)]
    latency: NonNegativeFloat
    loss: NonNegativeFloat
    bbr: bool
    sync_time: NonNegativeFloat
    tokens_per_step: PositiveInt | None
    num_replicas: PositiveInt
    replica_size: PositiveInt
    sync_every: PositiveInt | None
    num_fragments: PositiveInt | None
    overlap_steps: NonNegativeInt | None
    wire_dtype: str
    gradient_dtype: str
    targets: Annotated[list[InnerFraction], Field(min_length=1)]
    advice_target: InnerFraction
    vocab_size: PositiveInt | None
    data: PlanData
    run_dir: str


PRIMARY: dict[str | None, type[Section]] = {
    "pretrain": Pretrain,
    "finetune": Finetune,
    "compare": Compare,
    "plan": Plan,
}

_DEVICES = (
    Literal[-1]
    | PositiveInt
    | Annotated[list[NonNegativeInt], Field(min_length=1)]
    | Annotated[str, Field(pattern=r"^(auto|-1|\d+(,\d*)*)$")]
)
RANGES: dict[str, dict[str, Any]] = {
    "lightning.pytorch.Trainer": {
        "accelerator": Literal["auto", "cpu", "gpu", "cuda", "mps", "tpu"],
        "devices": _DEVICES,
        "num_nodes": PositiveInt,
        "max_steps": int,  # `fit` explains why it must be positive
        "max_epochs": Literal[-1] | PositiveInt | None,
        "accumulate_grad_batches": PositiveInt,
        "gradient_clip_val": NonNegativeFloat | None,
        "val_check_interval": PositiveInt | Annotated[float, Field(gt=0, le=1)] | None,
        "check_val_every_n_epoch": PositiveInt | None,
        "num_sanity_val_steps": Annotated[int, Field(ge=-1)],
        "overfit_batches": NonNegativeInt,
        "limit_train_batches": NonNegativeInt | Fraction | None,
        "limit_val_batches": NonNegativeInt | Fraction | None,
        "log_every_n_steps": NonNegativeInt,
    },
    "datetime.timedelta": dict.fromkeys(
        ("days", "hours", "minutes", "seconds"), Annotated[float, Field(gt=0, le=1e6)]
    ),
}
