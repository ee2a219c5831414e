"""Traffic between the ranks of one replica, by layout."""

from __future__ import annotations

from commfree_planner.bytes_sent import all_reduce_bytes, all_reduce_rounds, payload_bytes
from commfree_planner.layer_sums import LayerSums
from commfree_planner.training import Training


def inside_bytes(training: Training, replica_size: int) -> dict[str, float]:
    """Return the bytes that one rank sends within its replica in a step, by layout.

    With one forward and one backward per step, k ranks, and b bytes of gradients or weights:

    - ``ddp`` all-reduces the gradients: 2 b (k - 1) / k.
    - ``fsdp`` all-gathers the weights for forward and backward, and reduce-scatters the gradients:
      3 b (k - 1) / k. Under bf16-mixed the weights are gathered in bf16: 2 b (k - 1) / k for
      gradients in fp32.
    - ``domino`` all-reduces the activations four times per block; only if the tokens per step are
      known.

    Args:
        training: the run.
        replica_size: k, ranks of a replica.

    Raises:
        ValueError: `replica_size` is below 1.
    """
    if replica_size < 1:
        raise ValueError(
            f"`replica_size={replica_size}` must be at least 1: it counts the ranks of one replica."
        )
    model, dtype = training.model, training.gradient_dtype
    share = payload_bytes(model.params, dtype) * (replica_size - 1) / replica_size
    found = {"ddp": 2 * share, "fsdp": 3 * share}
    if training.tokens_per_step is not None:
        activations = payload_bytes(round(training.tokens_per_step * model.activation_width), dtype)
        sums = LayerSums(
            len(model.block_params),
            all_reduce_bytes(activations, replica_size),
            all_reduce_rounds(replica_size),
        )
        found["domino"] = sums.bytes_per_step
    return found


def inside_line(training: Training, replica_size: int) -> str:
    """Return the result of `inside_bytes` as a sentence."""
    sent = [
        f"{num_bytes / 1e6:,.4g} MB with inside={layout}"
        for layout, num_bytes in inside_bytes(training, replica_size).items()
    ]
    return f"Within a replica of {replica_size} ranks, each rank sends per step {', '.join(sent)}."
