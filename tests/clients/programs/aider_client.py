"""aider, by its command line, in a git repository: python aider_client.py URL GUARDED KEY."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, guarded, key = sys.argv[1:]
AIDER = [str(Path(sys.executable).with_name("aider")), "--model", "openai/alias", "--yes-always", "--no-pretty"]
AIDER += ["--no-check-update", "--no-show-release-notes", "--no-show-model-warnings", "--no-analytics", "--no-gitignore"]
AIDER += ["--map-tokens", "0", "--no-detect-urls", "--no-suggest-shell-commands", "--no-auto-lint", "--no-fancy-input"]
MODEL = {"alias": {"max_tokens": 2048, "max_input_tokens": 2048, "litellm_provider": "openai", "mode": "chat"}}
SOURCE = "def read(path):\n    return open(path).read()\n"


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
    settings = {"name": "openai/alias", "edit_format": "whole", "extra_params": {"max_tokens": 100, "temperature": 0.0}}
    Path(".aider.model.settings.yml").write_text(json.dumps([settings]))
    Path(".aider.model.metadata.json").write_text(json.dumps({f"openai/{name}": each for name, each in MODEL.items()}))
    git("init", "-q", ".")
    git("config", "user.name", "Somebody")
    git("config", "user.email", "somebody@example.com")
    git("add", "read.py")
    git("commit", "-q", "-m", "Begin")

    told = aider("--chat-mode", "ask", "--message", "Does it close the file?", "read.py")
    print(told)
    print("done ask")
    told = aider("--message", "Add a docstring.", "read.py")
    print(told, git("log", "--oneline"))
