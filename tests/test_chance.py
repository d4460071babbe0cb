"""No test fails by chance: what would have it judge time, memory or other programs is not in the tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
#: seconds: a shorter limit may end what a busy machine only takes long for
LEAST = 60
#: what has such limits
LIMITED = ("timeout", "wait", "wait_for", "join", "acquire", "result", "communicate", "run", "Barrier")
#: memory and time of processes
MEASURES = ("ru_maxrss", "getrusage", "statm", "cpu_times", "memory_info")
#: of these texts, which programs may print
PLACES = ("/proc/self/statm", "/proc/stat", "/proc/self/fd", "/proc/loadavg")
#: files in which a limit, a sleep or a measure is no judgement, and why
ALLOWED = {
    "bench/fake_peer.py": "plays one that hangs",
    "bench/test_peers.py": "looks in a made-up /proc; limits of what hangs on purpose",
    "cli/test_batch.py": "looks for a condition",
    "cli/test_replica.py": "looks for a condition",
    "engine/test_intake.py": "looks for a condition",
    "engine/test_programs.py": "looks for a condition",
    "joining.py": "looks for a condition",
    "test_chance.py": "names them",
    "server/test_adversity.py": "a device with slow steps",
    "text/merging_schemas.py": "sets a limit of memory by what there is",
    "text/test_tokenizer.py": "gives turns to another thread, and counts them",
}


def judged(tree: ast.AST) -> Iterator[str]:
    """What judges time, memory or other programs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in MEASURES:
            yield f"{node.lineno}: {node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in PLACES:
            yield f"{node.lineno}: {node.value}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            if called in ("time.sleep", "psutil.wait_procs"):
                yield f"{node.lineno}: {called}"
            elif node.func.attr in LIMITED:
                given = [each.value for each in node.keywords if each.arg == "timeout"]
                given += node.args[:1] if node.func.attr in ("timeout", "wait", "join", "result") else []
                seconds = [each.value for each in given if isinstance(each, ast.Constant)]
                # A tenth of a second is no limit: it passes on purpose.
                if any(isinstance(each, int | float) and 0.2 < each < LEAST for each in seconds):
                    yield f"{node.lineno}: a limit of {seconds} s"


def test_nothing_is_judged_that_a_busy_machine_changes() -> None:
    files = {path.relative_to(TESTS).as_posix(): path.read_text("utf-8") for path in TESTS.rglob("*.py")}
    found = {file: [*judged(ast.parse(text))] for file, text in files.items()}
    assert {file: lines for file, lines in found.items() if lines and file not in ALLOWED} == {}
    assert [file for file in ALLOWED if not found[file]] == [], "nothing is to be allowed there any more"
