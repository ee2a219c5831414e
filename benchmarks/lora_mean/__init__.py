"""What LoRA loses under DiLoCo because A and B are averaged apart and not as the product BA."""
