"""The OpenAI routes inside an aiohttp application that has routes of its own.

python examples/aiohttp_app.py        # then: curl 127.0.0.1:8080/add/17/25, and /v1/chat/completions
"""

from aiohttp import web

from aioinfer import Engine
from aioinfer.server import setup

ENGINE = web.AppKey("engine", Engine)


async def add(request: web.Request) -> web.Response:
    a, b = request.match_info["a"], request.match_info["b"]
    result = await request.app[ENGINE].generate([{"role": "user", "content": f"What is {a} + {b}?"}])
    return web.json_response({"answer": result.text})


def make_app() -> web.Application:
    app = web.Application()
    app[ENGINE] = Engine()
    app.router.add_get("/add/{a}/{b}", add)
    setup(app, app[ENGINE], prefix="/v1")  # also starts and closes the engine with the application
    return app


if __name__ == "__main__":
    web.run_app(make_app(), host="127.0.0.1", port=8080, handler_cancellation=True)
