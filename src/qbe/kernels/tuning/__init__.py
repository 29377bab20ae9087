"""The kernel cache: which launch configuration serves a problem, better ones found in the background, kept on disk."""
