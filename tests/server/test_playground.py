"""The playground: safe, and its own server's only."""

from __future__ import annotations

import base64
import hashlib
import re
from urllib.parse import urljoin

import pytest
from aiohttp import web

from aioinfer.errors import ConfigError
from aioinfer.server import create_app, setup
from tests.server.conftest import Serving
from tests.server.test_mounting import application, make_engine
from tests.toys.blocks import ScriptedDevice


async def test_the_page_needs_no_key_and_runs_nothing_but_its_own_script(serving: Serving) -> None:
    async with serving(server={"api_key": "secret"}) as served:
        reply = await served.get("/")
        assert (reply.status, reply.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    html = reply.text
    policy = dict(part.split(" ", 1) for part in reply.headers["Content-Security-Policy"].split("; "))
    for name in ("script", "style"):
        (content,) = re.findall(f"<{name}[^>]*>(.*?)</{name}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{name}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert (policy["connect-src"], policy["require-trusted-types-for"]) == ("'self'", "'script'")
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert reply.headers["Referrer-Policy"] == "no-referrer"
    # Nothing comes from elsewhere, texts of models become text nodes, and keys are kept in the tab only.
    for banned in ("http:", "https:", "url(", "@import", "style=", "javascript:", "{{"):
        assert banned not in html
    for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser"):
        assert banned not in html
    for banned in ("eval(", "new Function", "localStorage", "indexedDB", "document.cookie"):
        assert banned not in html


async def test_a_page_of_another_name_does_not_reach_it(serving: Serving) -> None:
    """DNS rebinding."""
    async with serving() as served:
        for path in ("/", "/debug/steps"):
            reply = await served.get(path, Host="evil.example")
            assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")


async def test_it_can_be_turned_off(serving: Serving) -> None:
    async with serving(server={"playground": False}) as served:
        assert (await served.get("/")).status == 404


async def test_an_application_has_it_where_it_asks_with_links_to_its_own_engine() -> None:
    app = web.Application()
    setup(app, make_engine(), prefix="/a/v1")
    assert "/a/" not in {each.canonical for each in app.router.resources()}
    setup(app, make_engine(), prefix="/b/v1", playground="/b/try")
    setup(app, make_engine(), prefix="/c/v1", playground="/c/")
    setup(app, make_engine(), prefix="/d/v1", health=None, playground="/d/")
    outer = web.Application()
    outer.add_subapp("/llm/", app)  # as behind a proxy
    async with application(outer) as client:
        for page in ("/llm/b/try", "/llm/c/"):
            html = (await client.get(page)).text
            for name, path in (("api", "models"), ("steps", "")):
                (link,) = re.findall(f'data-{name}="([^"]*)"', html)
                there = urljoin(page, f"{link}/{path}".rstrip("/"))
                assert there.startswith(page[:7])
                async with client.session.get(there) as response:  # the feed has no end
                    assert response.status == 200
        assert 'data-steps=""' in (await client.get("/llm/d/")).text


def test_a_path_that_is_none_or_taken_is_refused() -> None:
    app = web.Application()
    with pytest.raises(ConfigError, match="playground must begin with /"):
        setup(app, make_engine(), playground="try")
    app = create_app(make_engine())
    with pytest.raises(ConfigError, match="already has the route /"):
        setup(app, make_engine(), prefix="/b/v1", playground="/")


async def test_the_model_says_whether_it_writes_in_blocks(serving: Serving) -> None:
    async with serving(device=ScriptedDevice(num_slots=512, num_pages=512)) as served:
        model = (await served.get("/v1/models/toy")).json()
        assert model["block_size"] == served.engine.info.block_size > 1
