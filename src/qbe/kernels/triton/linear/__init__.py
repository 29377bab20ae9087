"""Linear layers: the op on a canonical weight (`nested`), and faster kernels on the layout made for GPUs (`tiled`)."""
