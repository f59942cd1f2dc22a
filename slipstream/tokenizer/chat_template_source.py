"""A model's chat template as its folder has it: Jinja source, and the special tokens that it may name.

Nothing is rendered here: the gateway does that (`gateway.text.chat_template`), the workers report the fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound
from slipstream.tokenizer.vocabulary import read_json, tokenizer_file

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names by which templates know special tokens."""


@dataclass(frozen=True, slots=True)
class ChatTemplateSource:
    templates: Mapping[str, str]
    """Jinja source by name: `default`, and in some models `tool_use` for requests with tools."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def chosen(self, *, tools: bool) -> str:
        """The source for a request. Raises FailedPrecondition where the model has templates of other names only."""
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self.templates:
                return self.templates[name]
        raise FailedPrecondition(
            f"The model has chat templates named {', '.join(sorted(self.templates))} and none named default; choose "
            "one with GATEWAY_CHAT_TEMPLATE, or `slipstream serve --chat-template FILE`.",
            reason="CHAT_TEMPLATE_MISSING",
        )

    def named(self, name: object) -> str:
        """The source of this name. Raises InvalidArgument for others: no template is taken from a request."""
        if not isinstance(name, str) or name not in self.templates:
            raise InvalidArgument(
                f"The model has chat templates named {', '.join(sorted(self.templates))}; chat_template names one of "
                "them, and takes no source.",
                reason="CHAT_TEMPLATE_UNKNOWN",
            )
        return self.templates[name]

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex over the templates. Models with equal ones were trained on the same form of a conversation."""
        return hashlib.sha256(json.dumps(dict(self.templates), sort_keys=True).encode()).hexdigest()


def load_chat_template(name: str, file: str = "") -> ChatTemplateSource | None:
    """The template in `file`, or else in the model's folder or hub repository: chat_template.jinja, else the one in
    tokenizer_config.json. None for a model without one. Raises NotFound for a `file` that cannot be read,
    FailedPrecondition for a broken configuration."""
    try:
        config = read_json(tokenizer_file(name, "tokenizer_config.json"))
    except NotFound:
        config = {}
    templates = {"default": _text(Path(file))} if file else _own_templates(name, config)
    return ChatTemplateSource(templates, _special_tokens(config)) if templates else None


def chat_template_fingerprint(name: str) -> str:
    """Fingerprint of a model's own template; empty for a model without one, or with a broken configuration: such a
    model serves, but no conversations."""
    try:
        source = load_chat_template(name)
    except FailedPrecondition:
        return ""
    return "" if source is None else source.fingerprint


def _own_templates(name: str, config: Mapping[str, Any]) -> Mapping[str, str]:
    try:
        return {"default": _text(tokenizer_file(name, "chat_template.jinja"))}
    except NotFound:
        pass
    found = config.get("chat_template") or {}
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list):
        found = {
            each["name"]: each["template"]
            for each in found
            if isinstance(each, dict) and {"name", "template"} <= set(each)
        }
    return {str(key): str(source) for key, source in found.items()} if isinstance(found, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name: strings in a configuration, or objects with `content`."""
    found = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def _text(file: Path) -> str:
    try:
        return file.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound(f"The chat template {file} cannot be read: {error}.", reason="FILE_MISSING") from error
