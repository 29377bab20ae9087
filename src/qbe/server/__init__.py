"""`qbe serve`: an OpenAI-compatible HTTP server in which precision is part of the contract.

An event loop (`app.py`) speaks HTTP; one thread (`worker.py`) steps the engine; one (`billing.py`) books what is
written before it goes out. They meet in queues alone. `observe/` tells what happens, `energy/` what that takes,
`console/` shows it.
"""
