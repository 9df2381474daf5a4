"""How engines follow what policy ranks send, part by part."""

import asyncio
from typing import Any

from ray.exceptions import RayError

PartRefs = list[Any]  # to what each rank says of a part, by rank
GRACE_S = 10.0  # in which the driver hears from a rank itself that it failed, and ends this engine with everything else


async def wait_for_part(refs: PartRefs) -> list[Any]:
    """What the ranks say of a part, once all have sent it."""
    try:
        return list(await asyncio.gather(*refs))
    except RayError:
        await asyncio.sleep(GRACE_S)
        raise
