"""The key-value store of a job: what its ranks tell each other before they are connected."""

from __future__ import annotations

import asyncio
import base64
import time

from zero2all.cluster.launch.rendezvous_messages import (
    AddToValue,
    CheckKeys,
    DeleteKey,
    GetValues,
    RequestError,
    SetValues,
)


class KeyValues:
    """
    >>> values = KeyValues()
    >>> values.add(AddToValue("ranks", 1))
    1
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._watchers: dict[str, list[asyncio.Event]] = {}

    def clear(self) -> None:
        self._values.clear()

    def set(self, request: SetValues) -> None:
        for key, value in request.values.items():
            self._set(key, base64.b64decode(value))

    async def get(self, request: GetValues) -> list[str]:
        """The values of all keys, once they are set."""
        deadline = time.monotonic() + request.seconds
        while missing := next((key for key in request.keys if key not in self._values), None):
            event = asyncio.Event()
            self._watchers.setdefault(missing, []).append(event)
            try:
                await asyncio.wait_for(event.wait(), max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise RequestError("timeout", f"{missing} is not there after {request.seconds:.0f} s") from None
        return [base64.b64encode(self._values[key]).decode() for key in request.keys]

    def add(self, request: AddToValue) -> int:
        total = int(self._values.get(request.key, b"0")) + request.amount
        self._set(request.key, str(total).encode())
        return total

    def check(self, request: CheckKeys) -> bool:
        return all(key in self._values for key in request.keys)

    def delete(self, request: DeleteKey) -> bool:
        return self._values.pop(request.key, None) is not None

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for event in self._watchers.pop(key, []):
            event.set()
