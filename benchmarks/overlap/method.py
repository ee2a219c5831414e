"""How the overlap tables were measured, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def method_lines(settings: Mapping[str, Any]) -> list[str]:
    """Return what was measured, and how."""
    batch, tokens = settings["shape"]
    return [
        "## How it was measured",
        "",
        f"transformers' LlamaForCausalLM with random weights: hidden {settings['hidden']},"
        f" {settings['layers']} layers in the laboratory and {settings['mechanism_layers']} over"
        f" links that only take time, vocabulary {settings['vocabulary']}; random tokens, batch"
        f" {batch} x {tokens}, fp32, tensor parallel over two ranks, one thread each. A step is"
        " forward with the loss, backward, fused AdamW. Each row has a model of its own in one"
        " pair of processes; a round takes one step of each row, in an order that rotates, between"
        f" barriers. Medians over {settings['rounds']} rounds: of the slower node's time, and of"
        " the nodes' mean waiting.",
        "",
        "Share hidden: (synchronous - Domino) / (synchronous - no communication). Without"
        " communication: the same sharded model, whose sums are taken for arrived at once (values"
        " are then wrong, and nothing else). A link that only takes time carries one transfer"
        " after the other and uses no CPU; its rate follows from the measured step without"
        f" communication, and each transfer takes {settings['latency_us']:.0f} microseconds more."
        " parallelize_module: inputs of attention and MLP become DTensors once, so that backward"
        " sums once for each, and the loss is taken of sharded logits; transformers' plan is the"
        " one in the model's config.",
        "",
        "The picture is drawn from a Chrome trace of `torch.profiler`, in which sublayers,"
        " launches and landings have names; profiling makes the step a little longer. In flight:"
        " from launch to the end of the landing, whether the sum has arrived before or not.",
    ]
