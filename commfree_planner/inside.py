"""What the ranks of one replica send to each other in a step, by how they hold it."""

from __future__ import annotations

from commfree_planner.bytes_sent import all_reduce_bytes, all_reduce_rounds, payload_bytes
from commfree_planner.layer_sums import LayerSums
from commfree_planner.training import Training


def inside_bytes(training: Training, replica_size: int) -> dict[str, float]:
    """Return the bytes that one rank sends to the others of its replica in a step.

    One forward and one backward a step; with k ranks and b bytes of gradients or weights:

    - ``ddp`` sums gradients in a ring: 2 b (k - 1) / k.
    - ``fsdp`` gathers the weights for forward and backward, and reduces and scatters the gradients:
      3 b (k - 1) / k.
    - ``domino`` sums activations, four times a block: of the replica's tokens, if they are known.

    Args:
        training: whose replica it is.
        replica_size: k, ranks of a replica.

    Raises:
        ValueError: `replica_size` is below 1.
    """
    if replica_size < 1:
        raise ValueError(
            f"`replica_size={replica_size}` must be at least 1: it counts the ranks of one replica."
        )
    model, dtype = training.model, training.gradient_dtype
    passed = payload_bytes(model.params, dtype) * (replica_size - 1) / replica_size
    found = {"ddp": 2 * passed, "fsdp": 3 * passed}
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
    """Return a sentence on `inside_bytes`."""
    sent = [
        f"{num_bytes / 1e6:,.4g} MB with inside={layout}"
        for layout, num_bytes in inside_bytes(training, replica_size).items()
    ]
    return (
        f"Within a replica of {replica_size} ranks each rank sends to the others in a step"
        f" {', '.join(sent)}."
    )
