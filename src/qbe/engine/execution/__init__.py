"""Running the model on a step: eager, compiled, or from a CUDA graph."""
