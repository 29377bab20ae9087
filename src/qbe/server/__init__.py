"""`qbe serve`: an OpenAI-compatible HTTP server in which precision is part of the contract.

An event loop (`app.py`) speaks HTTP; one thread (`worker.py`) steps the engine; they meet in queues alone.
"""
