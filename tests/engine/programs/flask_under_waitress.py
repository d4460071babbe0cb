"""Flask under waitress, whose threads share one LLM; the port is the argument."""

from __future__ import annotations

import os
import sys

from flask import Flask
from waitress import serve  # type: ignore[import-untyped]

from aioinfer import LLM, EngineConfig, SamplingParams

llm = LLM(EngineConfig(threads=1))
app = Flask(__name__)


@app.get("/<int:left>+<int:right>")
def add(left: int, right: int) -> dict[str, object]:
    chat = [{"role": "user", "content": f"What is {left} + {right}?"}]
    params = SamplingParams(temperature=0, max_tokens=16)
    (result,) = llm.generate([chat], params, progress=False)
    return {"text": result.text, "pid": os.getpid()}


serve(app, host="127.0.0.1", port=int(sys.argv[1]), threads=8)
