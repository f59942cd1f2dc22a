"""Simon Willison's `llm`, by its command line: python llm_client.py URL GUARDED KEY."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, guarded, key = sys.argv[1:]
LLM = str(Path(sys.executable).with_name("llm"))
MODELS = """
- {model_id: chat, model_name: alias, api_base: "URL/v1", supports_tools: true, supports_schema: true}
- {model_id: plain, model_name: alias, api_base: "URL/v1", completion: true}
- {model_id: told, model_name: alias, api_base: "URL/v1", responses: true, supports_tools: true, supports_schema: true}
- {model_id: keyed, model_name: alias, api_base: "GUARDED/v1", api_key_name: keyed}
"""
SHORT = ("-o", "max_tokens", "60", "-o", "temperature", "0", "-o", "seed", "7")


def llm(*arguments: str, fails: bool = False) -> str:
    """What the command writes; of one that fails its error."""
    done = subprocess.run([LLM, *arguments], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert bool(done.returncode) == fails, (arguments, done.stdout, done.stderr)
    return done.stderr if fails else done.stdout


with tempfile.TemporaryDirectory() as folder:
    os.environ["LLM_USER_PATH"] = folder
    Path(folder, "extra-openai-models.yaml").write_text(MODELS.replace("URL", url).replace("GUARDED", guarded))
    listed = llm("models")
    assert all(f": {name}" in listed for name in ("chat", "plain", "told", "keyed"))
    print("done models")

    said = llm("-m", "chat", "-s", "Be brief.", *SHORT, "Is 2 even?")
    assert said.strip() and said == llm("-m", "chat", "--no-stream", "-s", "Be brief.", *SHORT, "Is 2 even?")
    print("done chat")

    (logged,) = json.loads(llm("logs", "--json", "-n", "1"))
    assert logged["response"] == said.removesuffix("\n") and 0 < logged["output_tokens"] <= 60, logged
    assert llm("-m", "chat", "-c", *SHORT, "And 3?").strip()
    print("done conversation")

    for model, stream in (("chat", ()), ("told", ("--no-stream",)), ("told", ())):
        held = json.loads(llm("-m", model, *stream, "--schema", "even bool, digit int", *SHORT[:6], "Is 2 even?"))
        assert isinstance(held["even"], bool) and isinstance(held["digit"], int)
    print("done schema")

    for model in ("chat", "told"):
        llm("-m", model, "-T", "llm_version", *SHORT[:6], "Which version?")
    print("done tools")

    text = llm("-m", "plain", "-o", "max_tokens", "16", "-o", "temperature", "0", "-o", "logprobs", "2", "def f(")
    (logged,) = json.loads(llm("logs", "--json", "-n", "1"))
    assert text.strip() and logged["response_json"]["logprobs"]
    print("done completion")

    assert "maximum context length" in llm("-m", "chat", "even " * 20_000, fails=True)
    print("done error")

    assert llm("-m", "keyed", "--key", key, *SHORT, "Is 2 even?").strip()
    assert "401" in llm("-m", "keyed", "--key", "none", *SHORT, "Is 2 even?", fails=True)
    print("done key")
