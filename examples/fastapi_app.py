"""An engine inside FastAPI: events, a WebSocket, an answer that ends with its client, and OpenAI's routes.

pip install fastapi "uvicorn[standard]" && python examples/fastapi_app.py
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import StreamingResponse

from aioinfer import Engine, Stream, until_disconnected
from aioinfer.server import asgi_app

engine = Engine()


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with engine:
        yield


app = FastAPI(lifespan=lifespan)
app.mount("/llm", asgi_app(engine))  # /llm/v1/chat/completions and the rest, and a page at /llm/


def ask(question: str) -> Stream:
    return engine.generate([{"role": "user", "content": question}])


@app.get("/answer")
async def answer(request: Request, question: str) -> dict[str, str]:
    """The whole answer. Nobody else would notice that the client has left."""
    return {"answer": (await until_disconnected(request, ask(question))).text}


@app.get("/events")
async def events(question: str) -> StreamingResponse:
    """The answer as server-sent events. A client that leaves ends the generator, and so the request."""

    async def written() -> AsyncIterator[str]:
        async with ask(question) as stream:
            async for chunk in stream:
                yield f"data: {json.dumps(chunk.text)}\n\n"

    return StreamingResponse(written(), media_type="text/event-stream")


@app.websocket("/talk")
async def talk(socket: WebSocket) -> None:
    """Questions in, pieces of answers out. The next question ends an answer, and so does leaving."""

    async def reply(question: str) -> None:
        async with ask(question) as stream:
            async for chunk in stream:
                await socket.send_json({"text": chunk.text, "finish_reason": chunk.finish_reason})

    await socket.accept()
    replying: asyncio.Task[None] | None = None
    async with asyncio.TaskGroup() as group:
        async for question in socket.iter_text():
            if replying is not None:
                replying.cancel()
            replying = group.create_task(reply(question))
        if replying is not None:
            replying.cancel()


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=8080)
