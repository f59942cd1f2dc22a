"""Tokenizer files: loading them, end-of-sequence ids, and fingerprints that show whether two models share token ids.

No torch here: the gateway uses it too. A path that is a folder, or looks like one, never touches the network.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import FailedPrecondition, NotFound
from slipstream.tokenizer import hub
from slipstream.tokenizer.gguf_folder import gguf_folder, is_gguf
from slipstream.v1 import types_pb2

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHIPPED = Path(__file__).resolve().parents[1] / "models"
"""The small trained pair that comes with the package; in a checkout a link to the folder `models`."""
NEWEST = "main"
"""The revision of a hub id that names none: other weights tomorrow, perhaps."""
EMULATED = "emulated"
"""Prefix of the fingerprint of a model without a tokenizer."""


def is_local(name: str) -> bool:
    """Whether a model's name is a folder or a GGUF file rather than a hub id (`owner/name`, `name`, or one with
    `@REVISION`)."""
    return (
        Path(name).is_dir()
        or is_gguf(name)
        or name.startswith((".", "/", "~"))
        or name.partition("@")[0].count("/") > 1
    )


def source_and_revision(name: str) -> tuple[str, str]:
    """Splits a model's name into the two values that Hugging Face's libraries load it by: its folder, or its hub id,
    and the revision that stands after an `@` of a hub id: a commit, branch or tag; `main` where none does. Raises
    NotFound for a missing folder."""
    if is_local(name):
        return str(model_folder(name)), NEWEST
    hub.reachable()  # else its libraries get the setting that it is not, before they try
    source, _, revision = name.partition("@")
    return source, revision or NEWEST


def model_folder(name: str) -> Path:
    """The folder of a local name; of a GGUF file the one that it is converted to. Raises NotFound when it does not
    exist, and what `gguf_folder` raises."""
    if is_gguf(name):
        return gguf_folder(name)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise NotFound(
            f"There is no folder {name}; give the folder of a checkpoint or a hub id.", reason="MODEL_MISSING"
        )
    return folder


def check_folder(name: str) -> None:
    """Raises NotFound where a model is named by a folder that does not exist or holds no model, or by a hub id that is
    not in the cache while the hub cannot be reached. Emulated models pass."""
    if name.startswith(f"{EMULATED}:"):
        return
    if not is_local(name):
        if not hub.reachable():
            tokenizer_file(name, "config.json")
        return
    folder = model_folder(name)
    if not (folder / "config.json").is_file():
        files = sorted(file.name for file in folder.glob("*.gguf"))
        remedy = f"name one of its files: {name.rstrip('/')}/{files[0]}" if files else "give the folder of a checkpoint"
        raise NotFound(f"The folder {name} has no config.json; {remedy}.", reason="MODEL_MISSING")


def shipped_model(role: str) -> str:
    """The folder of the shipped `target` or `draft` model. Raises NotFound in an installation without them."""
    folder = (SHIPPED / role).resolve()
    if not folder.is_dir():
        raise NotFound(
            f"this installation has no {role} model; name one with --{role}, as a folder or a hub id.",
            reason="MODEL_MISSING",
        )
    return str(folder)


def load_tokenizer(name: str) -> Tokenizer:
    """Loads tokenizer.json from a folder or the hub, without the truncation and padding that some files set. Raises
    NotFound if it is missing, FailedPrecondition if it is broken."""
    # Imported here: a command that only compares models does without.
    from tokenizers import Tokenizer

    try:
        file = tokenizer_file(name, "tokenizer.json")
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    except NotFound:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise FailedPrecondition(
            f"The tokenizer of {name} cannot be read ({error}); give a tokenizer.json of the `tokenizers` library.",
            reason="TOKENIZER_BROKEN",
        ) from error


def fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256 in hex over the canonical JSON of (id, token) in order of ids, added tokens included."""
    digest = hashlib.sha256()
    for index, token in sorted((index, token) for token, index in tokenizer.get_vocab(with_added_tokens=True).items()):
        # JSON keeps tokens apart that a plain separator would join, lone surrogates included.
        digest.update(json.dumps([index, token]).encode())
    return digest.hexdigest()


def share_vocabulary(draft: types_pb2.ModelInfo, target: types_pb2.ModelInfo) -> bool:
    """Whether a token id means the same to both models. A lookup drafter has no vocabulary of its own and fits all."""
    return draft.vocabulary_fingerprint in ("", target.vocabulary_fingerprint)


def template_warning(draft: types_pb2.ModelInfo, target: types_pb2.ModelInfo) -> str:
    """A sentence where the target has a chat template that the draft model does not share; empty otherwise. A lookup
    drafter has no template and needs none."""
    wanted = target.chat_template_fingerprint
    if not draft.vocabulary_fingerprint or not wanted or draft.chat_template_fingerprint == wanted:
        return ""
    has = "another chat template" if draft.chat_template_fingerprint else "no chat template"
    return f"{draft.name} has {has}, unlike {target.name}: fewer of its candidates may be accepted in conversations."


def common_prefix(first: list[int], second: list[int]) -> int:
    """The number of tokens with which both texts begin. Bisects: comparing slices is far faster than elements."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


def eos_token_ids(name: str) -> tuple[int, ...]:
    """End-of-sequence ids from generation_config.json, else config.json; may be empty. Raises NotFound without
    config.json."""
    for wanted in ("generation_config.json", "config.json"):
        try:
            content = read_json(tokenizer_file(name, wanted))
        except NotFound:
            if wanted == "config.json":
                raise
            continue
        for part in (content, content.get("text_config") or {}):
            if part.get("eos_token_id") is not None:
                return as_ids(part["eos_token_id"])
    return ()


def as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """A tuple of ids, from the null, number or list that a configuration has."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def tokenizer_file(name: str, wanted: str) -> Path:
    """A file of a model's folder or hub repository. Raises NotFound when it is missing."""
    if is_local(name):
        file = model_folder(name) / wanted
        if not file.is_file():
            raise NotFound(f"The folder {name} has no {wanted}.", reason="FILE_MISSING")
        return file
    # Imported here: only hub ids need it.
    from huggingface_hub import hf_hub_download

    source, revision = source_and_revision(name)
    online = hub.reachable()
    try:
        return Path(hf_hub_download(source, wanted, revision=revision, local_files_only=not online))
    except (OSError, ValueError) as error:
        if not online:
            raise NotFound(
                f"{wanted} of {name} is not in the cache, and the hub cannot be reached (or {hub.OFFLINE} is set): "
                "name a folder, or download it where there is a connection.",
                reason="MODEL_MISSING" if wanted == "config.json" else "FILE_MISSING",
            ) from error
        raise NotFound(f"{wanted} of {name} cannot be had from the hub: {error}", reason="FILE_MISSING") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises FailedPrecondition for anything else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FailedPrecondition(f"{file} is not JSON: {error}", reason="CONFIG_BROKEN") from error
    if not isinstance(content, dict):
        raise FailedPrecondition(f"{file} is not a JSON object.", reason="CONFIG_BROKEN")
    return content
