"""`qbe serve` that kills itself with SIGKILL at a given write of its ledger: before, within or after the transaction.

QBE_TEST_DIES is WHERE:NUMBER; the options are those of `qbe serve`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from qbe.cli.main import main
from qbe.records.ledger import Ledger, LedgerEntry

WHERE, _, NUMBER = os.environ["QBE_TEST_DIES"].partition(":")
left = int(NUMBER)
write = Ledger.write


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def counted(self: Ledger, entries: Sequence[LedgerEntry]) -> None:
    global left
    left -= 1
    if left == 0 and WHERE == "before":
        die()
    if left == 0 and WHERE == "within":  # rows are in the transaction, which is not committed
        assert self._file._db is not None
        self._file._db.set_trace_callback(lambda sql: die() if sql.startswith("COMMIT") else None)
    write(self, entries)
    if left == 0:
        die()


Ledger.write = counted  # type: ignore[method-assign]
main()
