"""A server for tests of what runs servers: it answers with what it is and how it was made."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]


def create_app(bundle: str, **options: Any) -> Any:
    state = {"pid": os.getpid(), "bundle": bundle, "options": options, "is_up": False}

    async def app(
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["type"] == "lifespan":
            await receive()
            state["is_up"] = True
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(state).encode()})

    return app
