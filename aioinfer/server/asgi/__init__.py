"""The service as an ASGI application: the aiohttp application, driven by any ASGI server."""
