"""The engine over HTTP, in OpenAI's protocol, on aiohttp.

``create_app(engine)`` makes an application, ``setup(app, engine)`` adds the routes to yours, and
``serve(engine, config)`` runs one until told to stop.
"""

from aioinfer.server.app import create_app, serve, setup

__all__ = ["create_app", "serve", "setup"]
