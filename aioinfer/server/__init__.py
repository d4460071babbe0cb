"""The engine over HTTP, in OpenAI's protocol, on aiohttp.

``create_app(engine)`` creates an application, ``setup(app, engine)`` adds the routes to an existing one,
``asgi_app(engine)`` creates one for ASGI servers and frameworks, and ``serve(engine)`` runs a server. All
of them take settings as ``config=ServerConfig(...)``.
"""

from aioinfer.server.app import asgi_app, create_app, serve, setup

__all__ = ["asgi_app", "create_app", "serve", "setup"]
