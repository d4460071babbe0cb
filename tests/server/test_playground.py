"""The playground: safe, and its own server's only."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from urllib.parse import urljoin, urlsplit

import aiohttp
import pytest
from aiohttp import web

from aioinfer.errors import ConfigError
from aioinfer.server import create_app, setup
from tests.server.conftest import Serving
from tests.server.test_mounting import make_engine, running
from tests.toys.blocks import ScriptedDevice


async def get(session: aiohttp.ClientSession, url: str, **headers: str) -> tuple[aiohttp.ClientResponse, str]:
    async with session.get(url, headers={k.replace("_", "-"): v for k, v in headers.items()}) as response:
        return response, await response.text()


def policy_of(response: aiohttp.ClientResponse) -> dict[str, str]:
    return dict(part.split(" ", 1) for part in response.headers["Content-Security-Policy"].split("; "))


# -- the page ------------------------------------------------------------------------------------------


async def test_the_page_needs_no_key_and_runs_nothing_but_its_own_script(serving: Serving) -> None:
    async with serving(server={"api_key": "secret"}) as served, aiohttp.ClientSession() as session:
        response, html = await get(session, f"{served.url}/")
        assert (response.status, response.content_type, response.charset) == (200, "text/html", "utf-8")
        models, _ = await get(session, f"{served.url}/v1/models")
        assert models.status == 401
    policy = policy_of(response)
    for name in ("script", "style"):
        (content,) = re.findall(f"<{name}[^>]*>(.*?)</{name}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{name}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert (policy["connect-src"], policy["require-trusted-types-for"]) == ("'self'", "'script'")
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Referrer-Policy"] == "no-referrer"
    # Nothing comes from elsewhere, texts of models become text nodes, and keys are kept in the tab only.
    for banned in ("http:", "https:", "url(", "@import", "style=", "javascript:", "{{"):
        assert banned not in html
    for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser"):
        assert banned not in html
    for banned in ("eval(", "new Function", "localStorage", "indexedDB", "document.cookie"):
        assert banned not in html


async def test_a_page_of_another_name_does_not_reach_it(serving: Serving) -> None:
    """DNS rebinding."""
    async with serving() as served, aiohttp.ClientSession() as session:
        for path in ("/", "/debug/steps"):
            response, text = await get(session, served.url + path, Host="evil.example")
            assert response.status == 403
            assert json.loads(text)["error"]["code"] == "host_not_allowed"


async def test_it_can_be_turned_off(serving: Serving) -> None:
    async with serving(server={"playground": False}) as served, aiohttp.ClientSession() as session:
        response, _ = await get(session, f"{served.url}/")
        assert response.status == 404


async def test_an_application_has_it_where_it_asks_with_links_to_its_own_engine() -> None:
    app = web.Application()
    setup(app, make_engine(), prefix="/a/v1")
    assert "/a/" not in {each.canonical for each in app.router.resources()}
    setup(app, make_engine(), prefix="/b/v1", playground="/b/try")
    setup(app, make_engine(), prefix="/c/v1", playground="/c/")
    setup(app, make_engine(), prefix="/d/v1", health=None, playground="/d/")
    outer = web.Application()
    outer.add_subapp("/llm/", app)  # as behind a proxy
    async with running(outer) as url, aiohttp.ClientSession() as session:
        for page in ("/llm/b/try", "/llm/c/"):
            _, html = await get(session, url + page)
            for name, path in (("api", "models"), ("steps", "")):
                (link,) = re.findall(f'data-{name}="([^"]*)"', html)
                there = urljoin(url + page, f"{link}/{path}".rstrip("/"))
                assert urlsplit(there).path.startswith(page[:7])
                async with session.get(there) as response:
                    assert response.status == 200
        _, html = await get(session, f"{url}/llm/d/")
        assert 'data-steps=""' in html


def test_a_path_that_is_none_or_taken_is_refused() -> None:
    app = web.Application()
    with pytest.raises(ConfigError, match="playground must begin with /"):
        setup(app, make_engine(), playground="try")
    app = create_app(make_engine())
    with pytest.raises(ConfigError, match="already has the route /"):
        setup(app, make_engine(), prefix="/b/v1", playground="/")


async def test_the_model_says_whether_it_writes_in_blocks(serving: Serving) -> None:
    device = ScriptedDevice(num_slots=512, num_pages=512)
    async with serving(device=device) as served, aiohttp.ClientSession() as session:
        _, text = await get(session, f"{served.url}/v1/models/toy")
        assert json.loads(text)["block_size"] == served.engine.info.block_size > 1
