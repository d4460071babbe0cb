"""guidellm over chats, its default, completions and responses, with a tokenizer of a local directory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

REQUESTS = 8


def main(url: str, model: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        with tempfile.TemporaryDirectory() as directory:
            report = Path(directory) / "report.json"
            options = {
                "backend": f"kind=openai_http,target={url},request_format={path}",
                "tokenizer": f"kind=hf_auto,model={model}",
                "data": "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
                "profile": "kind=concurrent,streams=4",
                "constraint": f"kind=max_requests,count={REQUESTS}",
                "output": f"kind=json,path={report}",
            }
            given = [part for name, value in options.items() for part in (f"--{name}", value)]
            command = [sys.executable, "-m", "guidellm", "run", "--disable-console", *given]
            subprocess.run(command, check=True)
            (benchmark,) = json.loads(report.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        output = benchmark["metrics"]["output_token_count"]["successful"]["mean"]
        print("run", totals["successful"], totals["errored"], totals["incomplete"], output)


if __name__ == "__main__":
    main(*sys.argv[1:3])
