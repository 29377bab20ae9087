"""What all that reads a checkpoint folder calls things by. Without torch, which commands about files do without."""

MANIFEST = "qbe.json"
AGAIN = "run 'qbe quantize' again"  # what to do about a folder that it wrote
