"""How sequences lie in memory: prefix trees for training, and the slots of the KV cache."""
