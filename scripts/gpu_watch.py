"""A plug-in of pytest for machines with a GPU (`scripts/gpu_check.sh suite`): what failed is on disk at once.

    QBE_TEST_LOG=FOLDER/suite python -m pytest -p gpu_watch -n 8

Writes `$QBE_TEST_LOG.order` (every test as it begins, with its process) and `$QBE_TEST_LOG.failed`. After each test it
waits for the device, so that a bad access is found with the test that made it; the process then ends, because nothing
after it could run, and xdist starts another.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

_LOG = os.environ.get("QBE_TEST_LOG", "suite")
_WORKER = os.environ.get("PYTEST_XDIST_WORKER")
_BROKEN = ("illegal memory access", "device-side assert", "AcceleratorError", "misaligned address")


def _note(kind: str, text: str) -> None:
    with Path(f"{_LOG}.{kind}").open("a") as file:
        file.write(f"{time.strftime('%T')} {_WORKER} {os.getpid()} {text}\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    if _WORKER:
        _note("order", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not (_WORKER and report.failed):
        return
    text = report.longreprtext
    _note("failed", f"{report.when} {report.nodeid}\n{text[-4000:]}")
    if any(word in text for word in _BROKEN):
        os._exit(3)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    import torch

    if not (_WORKER and torch.cuda.is_available() and torch.cuda.is_initialized()):
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        _note("failed", f"at its end {item.nodeid}: the device is broken: {error}")
        os._exit(3)
