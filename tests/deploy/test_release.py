"""``.ci/release`` in a small repository, with a ``uv`` and a ``.ci/smoke`` that only say that they ran."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tiers import PROGRAM, rest

ROOT = Path(__file__).parents[2]
CHANGES = "# Changelog\n\n## Unreleased\n\n- Something new.\n\n## 0.1.0\n\nThe first.\n"
UV = """#!/bin/sh -e
for last; do case $last in platform=*) platform=${last#*=} ;; esac; done
mkdir -p "$last"
case "$*" in
    *--sdist*) echo sdist > "$last/aioinfer.tar.gz" ;;
    *) echo wheel > "$last/aioinfer-$platform.whl" ;;
esac
"""


class Repository:
    """One whose newest tag is v0.1.0, the version of its tree."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "aioinfer").mkdir()
        (path / ".ci").mkdir()
        (path / ".gitignore").write_text("/dist/\n/bin/\n/smoked\n")
        (path / "pyproject.toml").write_text('[project]\nname = "aioinfer"\nversion = "0.1.0"\n')
        (path / "aioinfer/_version.py").write_text('__version__ = "0.1.0"\n')
        (path / "CHANGELOG.md").write_text(CHANGES)
        shutil.copy2(ROOT / ".ci/release", path / ".ci/release")
        self.program("bin/uv", UV)
        self.program(".ci/smoke", "#!/bin/sh\necho yes > smoked\n")
        self.git("init", "--quiet", "--initial-branch", "main")
        self.git("config", "user.name", "a")
        self.git("config", "user.email", "a@b.c")
        self.commit()
        self.git("tag", "v0.1.0")

    def program(self, name: str, text: str) -> None:
        (self.path / name).parent.mkdir(exist_ok=True)
        (self.path / name).write_text(text)
        (self.path / name).chmod(0o755)

    def git(self, *arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=self.path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self) -> None:
        self.git("add", ".")
        self.git("commit", "--quiet", "--message", "Change it")

    def release(self, *arguments: str) -> tuple[int, str]:
        path = f"{self.path / 'bin'}:{os.environ['PATH']}"
        done = subprocess.run(
            [self.path / ".ci/release", *arguments],
            env=os.environ | {"PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


@rest(PROGRAM)
def test_one_command_makes_the_release(repository: Repository) -> None:
    before = repository.git("rev-parse", "HEAD")
    code, said = repository.release("0.2.0")
    assert code == 0, said
    assert said.startswith("\n- Something new.\n\naioinfer 0.2.0\n")
    assert {path.name for path in (repository.path / "dist").iterdir()} == {
        "aioinfer.tar.gz",
        *(f"aioinfer-{name}.whl" for name in ("linux-x86_64", "linux-aarch64", "darwin-arm64")),
    }
    assert (repository.path / "smoked").exists()
    # Without --tag, nothing has changed.
    assert (repository.git("rev-parse", "HEAD"), repository.git("status", "--porcelain")) == (before, "")

    code, said = repository.release("0.2.0", "--tag")
    assert code == 0, said
    assert "git push origin HEAD v0.2.0" in said
    assert repository.git("rev-parse", "v0.2.0^{commit}") == repository.git("rev-parse", "HEAD")
    assert repository.git("log", "-1", "--format=%s %P") == f"Release 0.2.0 {before}"
    assert 'version = "0.2.0"' in (repository.path / "pyproject.toml").read_text()
    assert (repository.path / "aioinfer/_version.py").read_text() == '__version__ = "0.2.0"\n'
    headings = [line for line in (repository.path / "CHANGELOG.md").read_text().split("\n") if "##" in line]
    assert [heading.split()[1] for heading in headings] == ["Unreleased", "0.2.0", "0.1.0"]
    # As the workflow does on the tag.
    assert repository.release("--expect", "v0.2.0")[0] == 0


@rest(PROGRAM)
def test_a_tree_that_breaks_a_rule_is_not_released(repository: Repository) -> None:
    for arguments, fault in (
        (["0.2"], "'0.2' is no version"),
        (["0.1.0rc1"], "not later"),
        (["--expect", "v0.2.0"], "the tag v0.2.0 is not v0.1.0"),
    ):
        (repository.path / "new").write_text(fault)
        repository.commit()
        code, said = repository.release(*arguments)
        assert code == 1
        assert fault in said
    (repository.path / "new").write_text("")
    assert "not committed" in repository.release()[1]
    (repository.path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 0.1.0\n\nThe first.\n")
    repository.commit()
    assert "the changelog has no section 0.2.0, or an empty one" in repository.release("0.2.0", "--tag")[1]
    assert repository.git("tag") == "v0.1.0"


@rest(PROGRAM)
def test_a_release_is_tagged_on_main(repository: Repository) -> None:
    repository.git("switch", "--quiet", "--create", "other")
    for arguments in (["0.2.0", "--tag"], ["--expect", "v0.1.0"]):
        code, said = repository.release(*arguments)
        assert (code, "HEAD is not on main" in said) == (1, True), said
    # A workflow has checked out a tag, and knows main as the branch of origin.
    repository.git("update-ref", "refs/remotes/origin/main", "main")
    repository.git("switch", "--quiet", "--detach", "v0.1.0")
    assert repository.release("--expect", "v0.1.0")[0] == 0
    assert "HEAD is not on main" in repository.release("0.2.0", "--tag")[1]
    assert repository.git("tag") == "v0.1.0"


@rest(PROGRAM)
def test_a_wheel_that_fails_in_an_environment_is_not_tagged(repository: Repository) -> None:
    repository.program(".ci/smoke", "#!/bin/sh\nexit 3\n")
    repository.commit()
    code, said = repository.release("0.2.0", "--tag")
    assert code == 1
    assert ".ci/smoke failed (3)" in said
    assert (repository.git("tag"), repository.git("status", "--porcelain")) == ("v0.1.0", "")
