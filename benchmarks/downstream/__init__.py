"""Whether a DiLoCo checkpoint fine-tunes worse than a DDP checkpoint of the same loss."""
