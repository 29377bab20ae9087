"""How bytes get to a device while steps run there: the part of residency that is the device's own."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Protocol

import torch

Pieces = Iterable[tuple[torch.Tensor, torch.Tensor]]  # uint8 on the device, and as many in locked host memory


class Transfer(Protocol):
    """Copies to one device.

    Attributes:
        device: where to.
    """

    device: torch.device

    def lock(self, memory: torch.Tensor) -> bool:
        """Lets the device read host memory at its own address, and copy from it beside its steps; whether it may."""

    def unlock(self, memory: torch.Tensor) -> None:
        """The device reads it no more."""

    def copy(self, pieces: Pieces) -> None:
        """Brings bytes to the device beside its steps, once what `given_up` spoke of is over; waits until they are
        there. Any thread."""

    def write(self, to: torch.Tensor, numbers: torch.Tensor) -> None:
        """Changes a tensor on the device between the steps that were launched and those to come; waits for none."""

    def given_up(self) -> None:
        """Steps that were launched may still read what is dropped now; later ones do not."""


class CudaTransfer:
    """By the copy engine, on a stream of its own; the steps' stream is the one that is current where they are launched.

    Host memory of any origin is page-locked in place, at an address that kernels can read, too.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.init()
        self._runtime: Any = torch.cuda.cudart()
        self._stream = torch.cuda.Stream(device)
        self._given_up: torch.cuda.Event | None = None
        self._staging: torch.Tensor | None = None
        self._staged = torch.cuda.Event()
        self._one_at_a_time = threading.Lock()

    def lock(self, memory: torch.Tensor) -> bool:
        with torch.cuda.device(self.device):
            return int(self._runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0

    def unlock(self, memory: torch.Tensor) -> None:
        torch.cuda.synchronize(self.device)
        self._runtime.cudaHostUnregister(memory.data_ptr())

    def copy(self, pieces: Pieces) -> None:
        with self._one_at_a_time, torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if self._given_up is not None:
                self._stream.wait_event(self._given_up)
            for to, source in pieces:
                to.copy_(source, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(self._stream)
        arrived.synchronize()

    def write(self, to: torch.Tensor, numbers: torch.Tensor) -> None:
        if self._staging is None or self._staging.shape != numbers.shape:
            self._staging = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        else:
            self._staged.synchronize()  # the copy before this one has long left the staging memory
        self._staging.copy_(numbers)
        to.copy_(self._staging, non_blocking=True)
        self._staged.record(torch.cuda.current_stream(self.device))

    def given_up(self) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._given_up = event
