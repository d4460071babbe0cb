"""The metrics of an engine in the registry of an application that has a /metrics already.

python examples/host_metrics.py    # then: curl 127.0.0.1:8080/summary and 127.0.0.1:8080/metrics
"""

from collections.abc import AsyncIterator

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import choose_encoder

from aioinfer import Engine, SamplingParams

ENGINE = web.AppKey("engine", Engine)
REGISTRY = CollectorRegistry()
SUMMARIES = Counter("shop_summaries", "Summaries written.", registry=REGISTRY)


async def summary(request: web.Request) -> web.Response:
    result = await request.app[ENGINE].generate("Once upon a time", SamplingParams(max_tokens=32))
    SUMMARIES.inc()
    return web.Response(text=result.text)


async def metrics(request: web.Request) -> web.Response:
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return web.Response(body=encode(REGISTRY), headers={"Content-Type": content_type})


async def running(app: web.Application) -> AsyncIterator[None]:
    async with app[ENGINE]:
        app[ENGINE].register(REGISTRY)  # until the engine is closed
        yield


def make_app() -> web.Application:
    app = web.Application()
    app[ENGINE] = Engine()
    app.cleanup_ctx.append(running)
    app.add_routes([web.get("/summary", summary), web.get("/metrics", metrics)])
    return app


if __name__ == "__main__":
    web.run_app(make_app(), host="127.0.0.1", port=8080)
