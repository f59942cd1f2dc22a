"""`python -m slipstream.engine.models.gguf_conversion FILE.gguf FOLDER`: a GGUF file's model as a Hugging Face folder.

transformers reads the weights out of their blocks. What its reader leaves out in silence would be another function:
scaled positions, keys of the header, tensors without a place. Those are put into the configuration, or the file is
refused. The exit status is `REFUSED` with the error as JSON on standard output for a typed error.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from slipstream.engine.models.gguf_file import OWN_FOLDER, GgufFile, read_header, refused
from slipstream.engine.models.quantisation import silence_quantiser_logs
from slipstream.errors import FailedPrecondition, NotFound, ResourceExhausted, SlipstreamError, code_number
from slipstream.tokenizer.gguf_folder import REFUSED

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
SHARD = "5GB"
FUNCTION_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logits_scaling",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "expert_used_count": "num_experts_per_tok",
}
"""Keys of a header that change what is computed, with the configuration's names."""
TURN_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys, behind `tokenizer.ggml.`, of the tokens at which generation ends."""
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
            "penalty_repeat": "repetition_penalty"}  # fmt: skip
"""Keys, behind `general.sampling.`, of what the model's makers sample with."""


def convert(file: Path, folder: Path) -> None:
    """Writes configuration, weights, tokenizer and chat template to a folder that does not exist.

    Raises what `read_header` raises, FailedPrecondition for a model that transformers cannot read whole,
    ResourceExhausted for a disk without room for its weights.
    """
    header = read_header(file)
    folder.parent.mkdir(parents=True, exist_ok=True)
    free, wanted = shutil.disk_usage(folder.parent).free, header.values * BYTES[header.dtype]
    if wanted > free:
        raise ResourceExhausted(
            f"{file.name} needs {wanted / 1e9:.1f} GB as a folder, and {folder.parent} has {free / 1e9:.1f} GB: free "
            "some, or set XDG_CACHE_HOME.",
            reason="DISK_FULL",
        )
    config = _config(header)
    model = _model(header, config)
    from slipstream.engine.models.gguf_tokenizer import load_tokenizer

    tokenizer = load_tokenizer(header)
    _save_weights(model, folder)
    _settled(config, model).save_pretrained(folder)
    _generation(header, tokenizer).save_pretrained(folder)
    for name in ("is_local", "local_files_only"):  # how it was read, which is nothing of the model's
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)


def _config(header: GgufFile) -> Any:
    from transformers import AutoConfig

    from slipstream.engine.models.gguf_rope import rope_parameters

    try:
        config: Any = AutoConfig.from_pretrained(
            str(header.file.parent), gguf_file=header.file.name, local_files_only=True
        )
    except Exception as error:  # the reader raises many kinds
        raise refused(
            header.file,
            f"transformers reads no GGUF file of the architecture {header.architecture!r} "
            f"({(str(error).splitlines() or [''])[0]})",
            OWN_FOLDER,
        ) from error
    size = header.field("attention.key_length")
    if size is not None and isinstance(getattr(config, "head_dim", None), int):
        config.head_dim = int(size)  # not read of every architecture
    found = getattr(config, "rope_parameters", None)
    if isinstance(found, dict) and "full_attention" not in found:
        dimensions = int(header.field("rope.dimension_count") or getattr(config, "head_dim", 0) or 0)
        config.rope_parameters = rope_parameters(header, found, dimensions)
    elif header.rope or header.field("rope.scaling.type") not in (None, "none"):
        raise refused(header.file, "its positions are scaled, which is not known of this architecture", OWN_FOLDER)
    if header.field("attention.sliding_window") is None and hasattr(config, "sliding_window"):
        config.sliding_window = None  # the default of its class is no statement of the file
    for key, name in FUNCTION_KEYS.items():
        value = header.field(key)
        if value is not None and not _equal(value, getattr(config, name, None)):
            raise refused(header.file, f"transformers does not read its {key} ({value})", OWN_FOLDER)
    return config


def _equal(value: Any, found: Any) -> bool:
    return isinstance(found, (int, float)) and abs(float(value) - float(found)) <= 1e-6 * abs(float(value))


def _model(header: GgufFile, config: Any) -> Any:
    """The model with its weights out of their blocks. Raises FailedPrecondition where any number of the file has no
    place in it, or any of its own none in the file."""
    import torch
    import transformers

    options: dict[str, Any] = {"dtype": getattr(torch, header.dtype), "output_loading_info": True}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a bar of its own
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                str(header.file.parent), gguf_file=header.file.name, config=config, local_files_only=True, **options
            )
    except (OSError, ValueError, RuntimeError, ImportError, NotImplementedError, KeyError, IndexError) as error:
        raise refused(
            header.file, f"transformers cannot read its weights ({(str(error).splitlines() or [''])[0]})", OWN_FOLDER
        ) from error
    lost = [*info["missing_keys"], *(str(each) for each in info["mismatched_keys"])]
    if lost:
        raise refused(header.file, f"it has no weights for {', '.join(sorted(lost)[:3])}", OWN_FOLDER)
    held = sum(tensor.numel() for tensor in _tensors(model).values())
    if held != header.values:
        raise refused(
            header.file, f"it holds {header.values} weights and transformers reads {held} of them", OWN_FOLDER
        )
    return model


def _tensors(model: Any) -> dict[str, Any]:
    """Its weights by name; of tied ones the first."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            found[name] = tensor.contiguous()
    return found


def _save_weights(model: Any, folder: Path) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    tensors = _tensors(model)
    plan = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=SHARD
    )
    folder.mkdir(parents=True)
    for name, names in plan.filename_to_tensors.items():
        save_file({each: tensors[each] for each in names}, folder / name, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _settled(config: Any, model: Any) -> Any:
    """The configuration as a folder has it, without what speaks of the file."""
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    config.architectures, config.dtype = [type(model).__name__], model.dtype
    return config


def _generation(header: GgufFile, tokenizer: Any) -> Any:
    from transformers import GenerationConfig

    ends = [header.fields.get(f"tokenizer.ggml.{key}") for key in TURN_ENDS]
    known = list(dict.fromkeys(int(each) for each in ends if each is not None))
    sampling = {name: header.fields.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    given = {name: value for name, value in sampling.items() if value is not None}
    if given:
        given["do_sample"] = True
    return GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=known[0] if len(known) == 1 else known or None,
        pad_token_id=tokenizer.pad_token_id,
        **given,
    )


def main() -> None:
    try:
        if len(sys.argv) != 3:
            raise NotFound("give a GGUF file and a folder: gguf_conversion FILE.gguf FOLDER")
        silence_quantiser_logs()
        try:
            from transformers.utils import logging as library_logging
        except ModuleNotFoundError as error:
            raise _missing(error) from error
        library_logging.set_verbosity_error()
        library_logging.disable_progress_bar()
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except ModuleNotFoundError as error:
        _refuse(_missing(error))
    except SlipstreamError as error:
        _refuse(error)


def _missing(error: ModuleNotFoundError) -> FailedPrecondition:
    return FailedPrecondition(
        f"Converting a GGUF file needs the package {error.name}, which is not installed here: "
        "pip install 'slipstream-serve[verifier,gguf]', or run `slipstream convert FILE.gguf FOLDER` where it is, and "
        "name the folder.",
        reason="GGUF_MISSING",
    )


def _refuse(error: SlipstreamError) -> None:
    print(json.dumps({"code": code_number(error), "message": error.message, "reason": error.reason}))
    sys.exit(REFUSED)


if __name__ == "__main__":
    main()
