"""Messages over a pair of pipes: eight bytes of length, then the message. Works in any thread."""

from __future__ import annotations

import os
import select
import struct
import time

_LENGTH = struct.Struct("<Q")


class Channel:
    """Sends on one pipe and receives on another. A deadline is a time of `time.monotonic`, in seconds.

    Raises TimeoutError when the deadline passes, EOFError when the other side is gone. After either the channel is of
    no more use.
    """

    def __init__(self, read_fd: int, write_fd: int):
        self._read_fd, self._write_fd = read_fd, write_fd
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)

    def send(self, message: bytes, deadline: float | None) -> None:
        left = memoryview(_LENGTH.pack(len(message)) + message)
        while left:
            _wait(self._write_fd, select.POLLOUT, deadline)
            try:
                left = left[os.write(self._write_fd, left) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise EOFError("the other side closed its end") from error

    def receive(self, deadline: float | None) -> bytes:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        return self._read(length, deadline)

    def _read(self, length: int, deadline: float | None) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            _wait(self._read_fd, select.POLLIN, deadline)
            try:
                part = os.read(self._read_fd, min(length - len(parts), 1 << 20))
            except BlockingIOError:
                continue
            if not part:
                raise EOFError("the other side closed its end")
            parts += part
        return bytes(parts)


def _wait(fd: int, event: int, deadline: float | None) -> None:
    poll = select.poll()
    poll.register(fd, event)
    left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
    if not poll.poll(left_ms):
        raise TimeoutError
