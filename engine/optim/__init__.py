"""Parameter groups, optimizers, the global gradient norm."""
