"""A model's chat template as its folder has it: Jinja source, and the special tokens that it may name.

Nothing is rendered here: the gateway does that (`gateway.text.chat_template`), the workers report the fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound
from slipstream.tokenizer.special_tokens import load_special_tokens
from slipstream.tokenizer.vocabulary import is_local, model_folder, read_json, source_and_revision, tokenizer_file

ADDITIONAL = "additional_chat_templates"
"""Folder of a model's templates beside the usual one."""
SHIPPED_FOLDER = Path(__file__).parent / "chat_templates"
SHIPPED: Mapping[str, tuple[str, ...]] = {
    "alpaca": ("### Instruction:",),
    "chatml": ("<|im_end|>",),
    "llama2": ("[INST]",),
    "llama3": ("<|eot_id|>",),
    "vicuna": ("USER:",),
    "zephyr": ("<|user|>",),
}
"""Templates for models that have none of their own, each with what ends the answer where the model writes it: a model
that was not trained on the template writes no end-of-text token there."""


@dataclass(frozen=True, slots=True)
class ChatTemplateSource:
    templates: Mapping[str, str]
    """Jinja source by name: `default`, and in some models `tool_use` for requests with tools."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    """Texts that end an answer, beside the model's own end-of-text tokens."""

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
                field="chat_template",
            )
        return self.templates[name]

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex over the templates. Models with equal ones were trained on the same form of a conversation."""
        return hashlib.sha256(json.dumps(dict(self.templates), sort_keys=True).encode()).hexdigest()


def load_chat_template(name: str, given: str = "") -> ChatTemplateSource | None:
    """The templates in the model's folder or hub repository, as transformers finds them: chat_template.jinja and
    additional_chat_templates/NAME.jinja, else those in tokenizer_config.json, else in chat_template.json. `given`: a
    file, or else the name of one of the model's or of a shipped one, that serves in place of them all. None for a model
    without one. Raises NotFound for a `given` that is none of these, FailedPrecondition for a broken configuration."""
    templates, tokens = _own_templates(name), load_special_tokens(name)
    if not given:
        return ChatTemplateSource(templates, tokens) if templates else None
    if Path(given).expanduser().is_file():
        return ChatTemplateSource({"default": _text(Path(given))}, tokens)
    if given in templates:
        return ChatTemplateSource({"default": templates[given]}, tokens)
    return shipped_template(given, tokens, also=templates)


def shipped_template(
    name: str, tokens: Mapping[str, str] | None = None, also: Iterable[str] = ()
) -> ChatTemplateSource:
    """A template that comes with this package. `also`: other names that there are. Raises NotFound for another name."""
    if name not in SHIPPED:
        raise NotFound(
            f"There is no chat template {name}: no such file, and none of these names: "
            f"{', '.join([*sorted(also), *SHIPPED])}.",
            reason="FILE_MISSING",
        )
    return ChatTemplateSource({"default": _text(SHIPPED_FOLDER / f"{name}.jinja")}, tokens or {}, SHIPPED[name])


def named_template(name: str, given: str) -> str:
    """`given` as it is understood in every folder. Raises NotFound where it is no template of this model's."""
    load_chat_template(name, given)
    file = Path(given).expanduser()
    return str(file.resolve()) if file.is_file() else given


def chat_template_fingerprint(name: str) -> str:
    """Fingerprint of a model's own template; empty for a model without one, or with a broken configuration: such a
    model serves, but no conversations."""
    try:
        source = load_chat_template(name)
    except FailedPrecondition:
        return ""
    return "" if source is None else source.fingerprint


def _own_templates(name: str) -> Mapping[str, str]:
    """Files come before the configuration, as a whole; last is the file of a model that also reads images."""
    files = dict[str, str]()
    with suppress(NotFound):
        files["default"] = _text(tokenizer_file(name, "chat_template.jinja"))
    files |= {each: _text(tokenizer_file(name, f"{ADDITIONAL}/{each}.jinja")) for each in _additional(name)}
    return files or _named(name, "tokenizer_config.json") or _named(name, "chat_template.json")


def _named(name: str, file: str) -> Mapping[str, str]:
    """Templates by name from a file's `chat_template`: one template, or several with names."""
    try:
        found = read_json(tokenizer_file(name, file)).get("chat_template") or {}
    except NotFound:
        return {}
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list):
        found = {
            each["name"]: each["template"]
            for each in found
            if isinstance(each, dict) and {"name", "template"} <= set(each)
        }
    return {str(key): str(source) for key, source in found.items()} if isinstance(found, dict) else {}


def _additional(name: str) -> list[str]:
    """Names of the templates in files of their own."""
    if is_local(name):
        return sorted(file.stem for file in (model_folder(name) / ADDITIONAL).glob("*.jinja"))
    # Imported here: only hub ids need it.
    from huggingface_hub import HfApi

    source, revision = source_and_revision(name)
    try:
        listed = [entry.path for entry in HfApi().list_repo_tree(source, ADDITIONAL, revision=revision)]
    except Exception:  # no such folder, or no connection: what was downloaded counts
        try:
            known = tokenizer_file(name, "tokenizer.json").parent / ADDITIONAL
        except NotFound:
            return []
        listed = [file.name for file in known.glob("*.jinja")]
    return sorted(Path(each).stem for each in listed if each.endswith(".jinja"))


def _text(file: Path) -> str:
    try:
        return file.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound(f"The chat template {file} cannot be read: {error}.", reason="FILE_MISSING") from error
