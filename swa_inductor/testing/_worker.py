"""A process of its own that answers requests, for what cannot be done with the Triton of the calling process.

Requests and answers are dicts of plain values and tensors, each one torch.save of known length over a pipe.
"""

from __future__ import annotations

import atexit
import io
import os
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch

_LENGTH = struct.Struct("<Q")


class WorkerError(RuntimeError):
    """A request failed in the worker; the message holds the worker's traceback."""


class Worker:
    """Runs `python -m module` and sends it requests, one at a time.

    The process starts with the first request, serves until this process ends and is started anew if it died.

    Args:
        module: its main program calls `serve`.
        environment: what the environment of the process adds to that of this one; None takes a variable away.
    """

    def __init__(self, module: str, environment: Mapping[str, str | None]) -> None:
        self._module = module
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lock = threading.Lock()
        atexit.register(self.close)

    def request(self, message: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and waits for the answer.

        Raises:
            WorkerError: the request raised in the worker, or the worker died of it.
        """
        with self._lock:
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                self._start()
            try:
                _write(self._to_worker, message)
                answer = _read(self._from_worker)
            except (BrokenPipeError, EOFError):
                assert self._process is not None
                code = self._process.wait()
                self.close()
                raise WorkerError(
                    f"the worker {self._module} died with exit status {code}"
                    + (" (a kernel accessed memory that is not mapped)" if code == -11 else "")
                ) from None
            except BaseException:
                self.close()  # an answer may still be on its way: never take it for that of the next request
                raise
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        self._to_worker.close()
        self._from_worker.close()
        process.terminate()
        process.wait()

    def _start(self) -> None:
        self.close()
        environment = {**os.environ, **{key: value for key, value in self._environment.items() if value is not None}}
        for key, value in self._environment.items():
            if value is None:
                environment.pop(key, None)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        request_read, request_write = os.pipe()
        answer_read, answer_write = os.pipe()
        command = [sys.executable, "-m", self._module, str(request_read), str(answer_write)]
        self._process = subprocess.Popen(
            command, env=environment, pass_fds=(request_read, answer_write), stdin=subprocess.DEVNULL
        )
        self._owner = os.getpid()
        os.close(request_read)
        os.close(answer_write)
        self._to_worker: BinaryIO = os.fdopen(request_write, "wb")
        self._from_worker: BinaryIO = os.fdopen(answer_read, "rb")


def serve(handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Main loop of a worker: answers requests with `handle` until the other side closes the pipe."""
    requests, answers = os.fdopen(int(sys.argv[1]), "rb"), os.fdopen(int(sys.argv[2]), "wb")
    while True:
        try:
            message = _read(requests)
        except EOFError:
            return
        try:
            answer = handle(message)
        except Exception:
            answer = {"error": traceback.format_exc()}
        _write(answers, answer)


def _write(pipe: BinaryIO, message: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(message, buffer)
    pipe.write(_LENGTH.pack(buffer.tell()))
    pipe.write(buffer.getbuffer())
    pipe.flush()


def _read(pipe: BinaryIO) -> dict[str, Any]:
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(header)
    body = pipe.read(length)
    if len(body) < length:
        raise EOFError
    return torch.load(io.BytesIO(body), weights_only=True)
