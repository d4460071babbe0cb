"""The OpenAI routes inside an aiohttp application that has routes of its own.

python examples/aiohttp_app.py    # then: curl 127.0.0.1:8080/add/17/25, /story/Mira and /v1/chat/completions
"""

import json

from aiohttp import web

from aioinfer import Engine
from aioinfer.server import setup

ENGINE = web.AppKey("engine", Engine)


async def add(request: web.Request) -> web.Response:
    a, b = request.match_info["a"], request.match_info["b"]
    result = await request.app[ENGINE].generate([{"role": "user", "content": f"What is {a} + {b}?"}])
    return web.json_response({"answer": result.text})


async def story(request: web.Request) -> web.StreamResponse:
    """A story as server-sent events. The request ends with the block, however that is left."""
    prompt = [{"role": "user", "content": f"Write a long story about {request.match_info['name']}."}]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    async with request.app[ENGINE].generate(prompt) as stream:
        await response.prepare(request)
        async for chunk in stream:
            await response.write(f"data: {json.dumps(chunk.text)}\n\n".encode())
    return response


def make_app() -> web.Application:
    app = web.Application()
    app[ENGINE] = Engine()
    app.router.add_get("/add/{a}/{b}", add)
    app.router.add_get("/story/{name}", story)
    setup(app, app[ENGINE], prefix="/v1")  # also starts and closes the engine with the application
    return app


if __name__ == "__main__":
    # With it, a client that leaves cancels its handler, and so ends its request.
    web.run_app(make_app(), host="127.0.0.1", port=8080, handler_cancellation=True)
