"""One answer, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from qbe.engine.result import Result

if TYPE_CHECKING:
    from qbe.engine.engine import Engine


class Stream:
    """The pieces of one answer, as an iterator; `result` afterwards. Dropping it early cancels the request."""

    def __init__(self, engine: Engine, request_id: str) -> None:
        self._engine, self._id = engine, request_id
        self._result: Result | None = None
        self._reading = False

    def __iter__(self) -> Iterator[str]:
        if self._reading:
            raise RuntimeError("a stream can be read once; its whole text is in `result`")
        self._reading = True
        try:
            while self._result is None:  # `close` ends the iteration, too
                done = self._engine.finished(self._id)  # before its last pieces: another thread's step may end it
                for piece in self._engine.take_pieces(self._id):
                    yield piece
                    if self._result is not None:
                        return
                if done:
                    break
                self._engine.step()
        finally:
            self.close()

    def close(self) -> None:
        """Cancels what has not been written yet and makes the result; does nothing when it is there."""
        if self._result is None:
            self._engine.cancel(self._id)
            self._result = self._engine.take_result(self._id)

    def __del__(self) -> None:
        self.close()  # a stream that nobody read must not go on in other requests' steps

    @property
    def result(self) -> Result:
        """The finished result. Raises RuntimeError before the iteration has ended."""
        if self._result is None:
            raise RuntimeError("the stream has not been read to its end yet")
        return self._result
