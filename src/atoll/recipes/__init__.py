"""Methods: one function per paper, and the only home of published hyperparameters."""
