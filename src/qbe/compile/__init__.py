"""torch.compile for models with nested linears: Inductor, with their calls kept and merged."""
