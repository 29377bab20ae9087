"""`/v1/files` and `/v1/batches`: requests from a file, answered beside live traffic and kept on disk."""
