"""mapper loads checkpoints onto PyTorch models from versioned YAML specs, and proves the load before it happens."""

__version__ = "0.1.0"
