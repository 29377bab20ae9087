"""Linear layers on the tiled layout (`layout`): few rows, batches, prompts; `launch` picks one for a call."""
