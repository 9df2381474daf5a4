"""A readers-writer lock for asyncio: generation is shared, changes of the engine are exclusive."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ReadWriteLock:
    """`async with lock.shared(): …` holds off `async with lock.exclusive(): …`, and the other way round."""

    def __init__(self) -> None:
        self.condition = asyncio.Condition()
        self.readers, self.writing = 0, False

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self.condition:
            await self.condition.wait_for(lambda: not self.writing)
            self.readers += 1
        try:
            yield
        finally:
            async with self.condition:
                self.readers -= 1
                self.condition.notify_all()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        async with self.condition:
            await self.condition.wait_for(lambda: not self.writing and not self.readers)
            self.writing = True
        try:
            yield
        finally:
            async with self.condition:
                self.writing = False
                self.condition.notify_all()
