"""What a training run leaves behind: its directory, metrics, checkpoints, curves and spans."""
