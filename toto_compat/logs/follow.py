"""Logs that are still written: what is appended, and the next file after a rotation, as `tail -F` gives it."""

import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from toto_compat.contract.events import Event
from toto_compat.logs.parse import BlockParser
from toto_compat.logs.source import explained

# Rounds without news after which an event that waits for more lines is told as it is.
_QUIET_ROUNDS = 4


class FollowedLog:
    """One log by its path, whatever file is there: grown, cut, replaced, or not there yet."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._file: io.FileIO | None = None
        self._parser = BlockParser(name)
        self._quiet = 0

    def news(self) -> Iterator[Event]:
        """Yield everything that came since the last call."""
        replaced = self._is_replaced()
        before = self._position
        yield from self._read()  # also the last words of a file that was renamed
        if replaced:
            yield from self.close()
            self._open()
            yield from self._read()
        self._quiet = self._quiet + 1 if self._position == before and not replaced else 0
        if self._quiet == _QUIET_ROUNDS:
            yield from self._parser.settle()

    def close(self) -> Iterator[Event]:
        """End what is read now."""
        if self._file is not None:
            yield from self._parser.close()
            self._file.close()
            self._file = None

    @property
    def _position(self) -> int:
        return self._file.tell() if self._file is not None else -1

    def _read(self) -> Iterator[Event]:
        if self._file is None:
            return
        with explained(self._name):
            if os.fstat(self._file.fileno()).st_size < self._file.tell():  # cut: `copytruncate`, or `> log`
                yield from self._parser.close()
                self._parser = BlockParser(self._name)
                self._file.seek(0)
            yield from self._parser.read(self._file)

    def _is_replaced(self) -> bool:
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False  # between the two steps of a rotation, or not yet begun
        if self._file is None:
            return True
        held = os.fstat(self._file.fileno())
        return (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino)

    def _open(self) -> None:
        with explained(self._name):
            self._file = io.FileIO(self._path)
        self._parser = BlockParser(self._name)


def follow(paths: Sequence[Path], names: Sequence[str], wait: Callable[[], bool]) -> Iterator[tuple[int, Event]]:
    """Yield the events of logs as they come, with the index of the log.

    `wait` is called when there is no more for now, and ends it by returning False.
    """
    logs = [FollowedLog(path, name) for path, name in zip(paths, names, strict=True)]
    while True:
        for index, log in enumerate(logs):
            for event in log.news():
                yield index, event
        if not wait():
            break
    for index, log in enumerate(logs):
        for event in log.close():
            yield index, event
