"""The OpenAPI document, made from the declarations of the routes, and the page that shows it.

How to add an endpoint: declare it next to its handler, as one :class:`~.endpoints.Endpoint`::

    RESPONSES = Endpoint(
        "POST",
        "/responses",
        "Generate an answer",
        body=ResponsesBody,                             # a model: see aioinfer.server.openai.fields
        answer=Response,                                # a TypedDict: see aioinfer.server.openai.objects
        events=ResponseEvent,                           # of each event, if the answer can be streamed
        generates=True,                                 # 429, 503 and 504 can occur, too
    )

and add ``RESPONSES.route(handler)`` to the routes of :class:`aioinfer.server.routes.Routes`. That registers
the handler and puts the endpoint into the document; there is no third place. Endpoints whose errors have
another form than OpenAI's name it as ``error``. Handlers of ``open=True`` get no check of the key.
"""
