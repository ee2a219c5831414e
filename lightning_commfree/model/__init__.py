"""Operations on the tensors of a model: sharding, weight swap, meta initialization."""
