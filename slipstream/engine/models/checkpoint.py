"""A checkpoint: any Hugging Face causal language model, loaded for packed serving by the library itself."""

from __future__ import annotations

import contextlib
import logging
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.utils import logging as library_logging

from slipstream.engine.attention.packed import NAME, register
from slipstream.engine.forward import Forward
from slipstream.engine.kernels.compiled import find_kernels
from slipstream.engine.kvcache.store import AttentionLayer
from slipstream.engine.model_info import DIGITS, ModelInfo
from slipstream.engine.models.arithmetic import computation_of
from slipstream.engine.models.attention_layers import probe_layers
from slipstream.engine.models.description import describe, weights_revision
from slipstream.engine.models.fast_dtype import announced_dtype
from slipstream.engine.models.forward_trial import Tried, lean_decoder, try_forward
from slipstream.engine.models.known_files import KnownFiles
from slipstream.engine.models.lean_selection import FAMILIES, fits
from slipstream.engine.models.older_attention import OLDER, adapt
from slipstream.engine.models.quantisation import convert, loading_options, prepare_checkpoint
from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound
from slipstream.tokenizer.vocabulary import is_local, source_and_revision

log = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")
_SAYS = "_supports_attention_backend"
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Model types whose code comes with the checkpoint, and is what the library has under another name."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    forward: Forward
    layers: list[AttentionLayer]
    info: ModelInfo
    device: torch.device
    """The device of the model's input tokens."""

    @property
    def forward_path(self) -> str:
        """One of "kernels", "lean" and "library" (`slipstream.engine.forward.Forward.path`)."""
        return self.forward.path


def load_checkpoint(
    name: str,
    dtype: str = "auto",
    device: str = "cpu",
    quantisation: str = "",
    lean: bool = True,
) -> Checkpoint:
    """From a folder (never the network) or a hub id, with `@REVISION` behind it or its newest. Safetensors only, no
    remote code. `lean`: without the library's modelling code where `slipstream.engine.models.lean_selection` can do
    without it.

    Raises NotFound for a missing folder, FailedPrecondition for a family that cannot be packed, broken files
    or a package that is not installed, InvalidArgument for an unknown dtype or quantisation.
    """
    if dtype not in DTYPES:
        raise InvalidArgument(f"dtype {dtype!r} is unknown; choose one of {', '.join(DTYPES)}.")
    library_logging.disable_progress_bar()
    source, revision = source_and_revision(name)
    options: dict[str, Any] = {"local_files_only": is_local(name), "revision": revision, "trust_remote_code": False}
    config = _load_config(source, options)
    quantised = prepare_checkpoint(source, config) or quantisation
    own = getattr(config.get_text_config(decoder=True), "dtype", None)
    asked, kernels = dtype, lean and config.model_type in FAMILIES and find_kernels() is not None
    if dtype == "auto" and device == "cpu" and not quantised and isinstance(own, torch.dtype):
        dtype = str(announced_dtype(name, own, kernels=kernels)).removeprefix("torch.")
    place, weights = torch.device(device), weights_revision(name)
    read = None if quantised or not lean else _known_files(name, weights, config, dtype, place)
    if read is not None and (known := read.read()) is not None:
        parts, info = known
        return _checkpoint(Tried(lean_decoder(parts.model, parts.layers)), parts.layers, info, place)
    model = _load_model(source, config, options | loading_options(quantisation, config, dtype, device))
    parameters = model.num_parameters()  # now: the modules that replace others below have none
    model = convert(quantisation, model).eval().requires_grad_(False)
    if not quantised:
        model.to(device)
    layers = _layers(model, config, place, quantised)
    precision = "/".join(part for part in (quantised, str(layers[0].dtype).removeprefix("torch.")) if part)
    generation = model.generation_config
    size = model.get_output_embeddings().out_features
    info = replace(describe(name, weights, config, generation, size, parameters), dtype=precision)
    fast = lean and quantised in ("", "int8") and fits(model)
    for_kernels = kernels and asked != dtype  # which may not serve this model, in whose type it is slow without them
    if for_kernels and not fast:
        return load_checkpoint(name, asked, device, quantisation, lean=False)
    alike = read is not None and fast and read.equals(model, layers, info)  # now: a lean pass takes the weights
    tried = try_forward(model, layers, info, place, lean=fast)
    if for_kernels and tried.notice:  # kernels may have lost too much in that type alone
        loaded = load_checkpoint(name, "float32", device, quantisation)
        return replace(loaded, info=replace(loaded.info, forward_notice=tried.notice))
    if read is not None and alike and tried.forward.path != "library":
        read.keep(layers)
    return _checkpoint(tried, layers, info, place)


def _known_files(name: str, weights: str, config: Any, dtype: str, place: torch.device) -> KnownFiles | None:
    """None for a checkpoint that the library alone reads."""
    served = getattr(config, "dtype", None) if dtype == "auto" else getattr(torch, dtype)
    if config.model_type not in FAMILIES or place.type != "cpu" or not isinstance(served, torch.dtype):
        return None
    return KnownFiles(name, weights, config, served)


def _checkpoint(tried: Tried, layers: list[AttentionLayer], info: ModelInfo, place: torch.device) -> Checkpoint:
    computed = computation_of(info.revision.removeprefix("local-")[:DIGITS], info.dtype, tried.forward, layers)
    if place.type == "cpu" and tried.forward.uneven:
        operators = ", ".join(sorted(tried.forward.uneven))
        log.info("%s: a row may depend on the other rows of a pass by torch's %s", info.name, operators)
    info = replace(
        info,
        arithmetic=computed.name,
        batch_invariant=computed.batch_invariant,
        most_candidates=computed.most_candidates,
        forward_path=tried.forward.path,
        forward_notice=tried.notice,
    )
    return Checkpoint(tried.forward, layers, info, place)


def describe_checkpoint(name: str) -> ModelInfo:
    """Describes the model as `load_checkpoint` does, without its weights; `dtype` is empty. Raises NotFound for a
    missing model, FailedPrecondition for one that is no causal language model."""
    source, options, config = _configuration(name)
    model = _without_weights(source, config)
    with contextlib.suppress(OSError):  # many checkpoints have no file of it
        model.generation_config = GenerationConfig.from_pretrained(source, **options)
    size = model.get_output_embeddings().out_features
    revision, parameters = weights_revision(name), model.num_parameters()
    return describe(name, revision, model.config, model.generation_config, size, parameters)


def model_without_weights(name: str) -> Any:
    """The library's model on the meta device, which has shapes alone. Raises as `describe_checkpoint`."""
    source, _, config = _configuration(name)
    return _without_weights(source, config)


def _configuration(name: str) -> tuple[str, dict[str, Any], Any]:
    """Where the model is, how the library reads it there, and its configuration."""
    source, revision = source_and_revision(name)
    options: dict[str, Any] = {"local_files_only": is_local(name), "revision": revision}
    try:
        return source, options, _read_config(source, options)
    except (OSError, KeyError) as error:
        raise NotFound(f"No usable config.json for {source}: {error}", reason="MODEL_MISSING") from error
    except ValueError as error:
        raise _unreadable(source, error) from error


def _read_config(source: str, options: dict[str, Any]) -> Any:
    """Raises what the library does."""
    given, _ = PretrainedConfig.get_config_dict(source, **options)
    if (kind := _SAME_AS.get(given.get("model_type", ""))) is None:
        return AutoConfig.from_pretrained(source, **options | {"trust_remote_code": False})
    return AutoConfig.for_model(kind, **{key: given[key] for key in given.keys() - {"model_type", "auto_map"}})


def _load_config(source: str, options: dict[str, Any]) -> Any:
    """Raises NotFound without one, and FailedPrecondition for a family that cannot be packed: before any weight is
    read."""
    try:
        config = _read_config(source, options)
    except (OSError, ValueError, KeyError) as error:
        raise NotFound(f"No usable config.json for {source}: {error}", reason="MODEL_MISSING") from error
    if config.model_type not in FAMILIES:  # these may need none of the library's modelling code, which this imports
        _check_family(source, config)
    return config


def why_unsupported(config: Any) -> str:
    """Why no model of this configuration can be packed; empty where its class promises what that needs."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder or text.is_encoder_decoder:
        return "it is an encoder-decoder model"
    other = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if other:
        return f"it has {', '.join(sorted(other))} layers"
    if getattr(text, "use_bidirectional_attention", None) not in (None, False, "vision"):
        return "its attention looks ahead"
    try:
        kind = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        return f"{type(config).__name__} is no causal language model"
    if getattr(kind, "_is_stateful", False):
        return "its recurrent state cannot be rolled back"
    known = config.model_type in OLDER or _calls_the_interface(kind)
    return "" if known else "its attention cannot be replaced"


def _calls_the_interface(kind: type[Any]) -> bool:
    """Whether a class calls the attention that is plugged in. Some do and do not say so (StableLM, BioGPT): the trial
    shows whether that is their whole attention. Where another part alone does, as GIT's eyes, a table has the rest."""
    said = [vars(each)[_SAYS] for each in kind.__mro__ if _SAYS in vars(each) and each.__name__ != "PreTrainedModel"]
    if said:
        return bool(said[0])
    names = vars(sys.modules[kind.__module__])
    return "ALL_ATTENTION_FUNCTIONS" in names and not any(name.endswith("ATTENTION_CLASSES") for name in names)


def _check_family(source: str, config: Any) -> None:
    """Raises FailedPrecondition for a family that cannot be packed."""
    if why := why_unsupported(config):
        raise _unsupported(source, why)


def _without_weights(source: str, config: Any) -> Any:
    """The model on the meta device, which has shapes alone. Raises FailedPrecondition for a configuration that is no
    causal language model's, or that the library cannot read."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (KeyError, ValueError) as error:
        raise _unreadable(source, error) from error


def _load_model(source: str, config: Any, options: dict[str, Any]) -> Any:
    """Imports the library's modelling code. Raises FailedPrecondition."""
    _check_family(source, config)
    register()
    attends = OLDER[config.model_type].reference if config.model_type in OLDER else NAME
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source, config=config, attn_implementation=attends, use_safetensors=True, **options
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise FailedPrecondition(f"{source} cannot be loaded: {error}", reason="MODEL_BROKEN") from error
    adapt(model)
    return model


def _layers(model: Any, config: Any, device: torch.device, quantised: str) -> list[AttentionLayer]:
    text = config.get_text_config(decoder=True)
    try:
        layers = probe_layers(model, device)
    except FailedPrecondition as error:
        raise _unsupported(config.model_type, str(error)) from error
    except (RuntimeError, AssertionError, AttributeError, ValueError, TypeError, IndexError) as error:
        if not quantised:
            why = f"the library's own pass fails ({error}), perhaps by what config.json says"
            raise _unsupported(config.model_type, why) from error
        # Kernels of quantisers look at a model's shape only when they first see a token.
        raise FailedPrecondition(
            f"{quantised} cannot compute this {config.model_type} ({error}); choose another quantisation.",
            reason="QUANTISER_UNFIT",
        ) from error
    if sorted(layer.index for layer in layers) != list(range(text.num_hidden_layers)):
        raise _unsupported(config.model_type, "not every layer is one attention layer")
    types = getattr(text, "layer_types", None) or ["full_attention"] * len(layers)
    blind = [layer.index for layer in layers if types[layer.index] == "sliding_attention" and layer.window is None]
    if blind:
        raise _unsupported(config.model_type, f"layers {blind} keep their sliding window from the attention function")
    return layers


def _unreadable(name: str, error: Exception) -> FailedPrecondition:
    return _unsupported(name, f"transformers cannot read it ({str(error).splitlines()[0]})")


def _unsupported(name: str, why: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{name} cannot be served: {why}. Choose a decoder of full and sliding attention (docs/models.md), or serve it "
        "with vLLM (--engine vllm).",
        reason="MODEL_UNSUPPORTED",
    )
