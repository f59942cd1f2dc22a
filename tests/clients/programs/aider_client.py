"""aider, by its command line, in a git repository: python aider_client.py URL GUARDED KEY."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, guarded, key = sys.argv[1:]
AIDER = [str(Path(sys.executable).with_name("aider")), "--yes-always", "--no-pretty"]
AIDER += [
    "--no-check-update",
    "--no-show-release-notes",
    "--no-show-model-warnings",
    "--no-analytics",
    "--no-gitignore",
]
AIDER += ["--map-tokens", "0", "--no-detect-urls", "--no-suggest-shell-commands", "--no-auto-lint", "--no-fancy-input"]
LIMITS = {"max_tokens": 2048, "max_input_tokens": 200_000, "litellm_provider": "openai", "mode": "chat"}
SOURCE = "def read(path):\n    return open(path).read()\n"
EDIT = r"read\.py\n```\nname = '[a-z]{1,9}'\n```\n"
"""A file as aider's format `whole` has it, which no tiny model writes by itself."""


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def aider(*arguments: str, address: str = url, key: str = "none") -> str:
    """What the command writes."""
    command = [*AIDER, "--openai-api-base", f"{address}/v1", "--openai-api-key", key, *arguments]
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL, env=environment
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    os.environ["HOME"] = folder
    Path("read.py").write_text(SOURCE)
    common = {"max_tokens": 60, "temperature": 0.0, "seed": 7}
    held = common | {"extra_body": {"structured_outputs": {"regex": EDIT}}}
    settings = [
        {"name": "openai/alias", "edit_format": "whole", "extra_params": common},
        {"name": "openai/target", "edit_format": "whole", "extra_params": held, "weak_model_name": "openai/alias"},
    ]
    Path(".aider.model.settings.yml").write_text(json.dumps(settings))  # JSON is YAML
    Path(".aider.model.metadata.json").write_text(
        json.dumps({f"openai/{name}": LIMITS for name in ("alias", "target")})
    )
    git("init", "-q", ".")
    git("config", "user.name", "Somebody")
    git("config", "user.email", "somebody@example.com")
    git("add", "read.py")
    git("commit", "-q", "-m", "Begin")

    ask = ("--model", "openai/alias", "--chat-mode", "ask", "--no-git", "read.py", "--message")
    whole = aider(*ask, "Does it close the file?", "--no-stream")
    answer = whole.partition("Added read.py to the chat.")[2].partition("Model openai/alias")[0].strip()
    assert answer and answer in aider(*ask, "Does it close the file?"), whole
    print("done ask")

    told = aider("--model", "openai/target", "--message", "Name it.", "read.py")
    assert "Applied edit to read.py" in told and Path("read.py").read_text().startswith("name = '"), told
    assert len(git("log", "--oneline").splitlines()) == 2 and not git("status", "--short", "read.py"), told
    print("done edit")

    told = aider(*ask, "even " * 20_000)
    assert "has hit a token limit" in told and "0 received" in told, told  # so it says what our error is
    print("done error")

    assert "AuthenticationError" not in aider(*ask, "Hi", address=guarded, key=key)
    told = aider(*ask, "Hi", address=guarded)
    assert "AuthenticationError" in told, told
    print("done key")
