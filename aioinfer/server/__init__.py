"""The engine over HTTP, in OpenAI's protocol, on aiohttp.

``create_app(engine)`` creates an application, ``setup(app, engine)`` adds the routes to an existing one, and
``serve(engine, config)`` runs a server.
"""

from aioinfer.server.app import create_app, serve, setup

__all__ = ["create_app", "serve", "setup"]
