"""Training: models, data, inner optimizers, the loop, its records and its checkpoints."""
