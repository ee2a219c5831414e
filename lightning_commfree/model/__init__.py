"""Operations on a model's tensors: sharding, weight swapping, meta-device initialization."""
