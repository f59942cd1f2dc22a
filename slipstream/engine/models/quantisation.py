"""Quantised weights as a choice at the start, made by the libraries' own quantisers while a checkpoint is loaded.

    name          quantiser                                   weights       activations       for
    int8          torchao, Int8WeightOnlyConfig               int8, a row   as `dtype` says   drafts and targets
    int4          bitsandbytes, NF4 in blocks of 64           4 bits        as `dtype` says   drafts and targets
    int8-dynamic  torch.ao.quantization.quantize_dynamic      int8, a row   7 bits, fp32      drafts, on a CPU only

Linear layers are quantised. Embeddings and norms always stay, and so do the experts of mixtures, which the library
keeps outside of linear layers. The output head stays too under int8 and int4 (the libraries' default: what is lost
there is lost in every choice); int8-dynamic quantises it, because a draft model's head is much of what a guess reads.

A target may only be quantised so that a row of logits does not depend on the other rows of its pass. int8-dynamic
rounds all activations of a pass on one scale: the same token among other candidates gets other numbers, and there is
no text of the target alone. A draft's numbers only decide how often it is right.

On a CPU with kernels for it (`slipstream.engine.kernels`) int8 takes two thirds of bf16's time for one token and as
long for eight; without them it costs more than bf16 and only saves memory. With AVX512-BF16, int4 multiplies in bf16
whatever `dtype` is, so its texts have the guarantees of bf16.
On CUDA int8 and int4 are the same two libraries' kernels. Nothing here was run on CUDA.

bitsandbytes fetches a kernel from the hub if the package `kernels` is installed; it is not among our dependencies.

A checkpoint that is quantised already needs no choice. FP8 and MXFP4 are read as bfloat16, so they have its paths and
promises; bitsandbytes' and torchao's stay as they are. Others (AWQ, GPTQ, compressed-tensors, ...) have kernels for
GPUs alone, which are vLLM's: they are refused before a weight is read.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import FailedPrecondition, InvalidArgument

EXTRA = "pip install 'slipstream-serve[quantised]'"
# On import and first use they log about kernels for other machines; errors are raised.
_NOISY_LOGGERS = ("torchao", "bitsandbytes", "torch.utils._pytree")


@dataclass(frozen=True, slots=True)
class Quantiser:
    packages: tuple[str, ...] = ()
    """Packages it needs besides torch and transformers."""
    steady: bool = True
    """A row's numbers do not depend on the other rows of its pass."""
    dtypes: tuple[str, ...] = ("auto", "float32", "bfloat16", "float16")
    devices: tuple[str, ...] = ("cpu", "cuda")


QUANTISERS = {
    "int8": Quantiser(packages=("torchao", "accelerate")),
    "int4": Quantiser(packages=("bitsandbytes", "accelerate")),
    "int8-dynamic": Quantiser(steady=False, dtypes=("auto", "float32"), devices=("cpu",)),
}


DEQUANTISED = ("fp8", "mxfp4")
"""Methods of checkpoints whose weights are read as numbers of an ordinary type."""
KEPT = {"bitsandbytes": ("bitsandbytes", "accelerate"), "torchao": ("torchao", "accelerate")}
"""Methods of checkpoints that compute with their own weights, and the packages that they need."""


def prepare_checkpoint(source: str, config: Any) -> str:
    """The method that a checkpoint's weights stay quantised in; empty for one that is not, or is read as numbers of an
    ordinary type, which is written into `config`.

    Raises FailedPrecondition for a method that is not read here, or whose packages are not installed.
    """
    method = quantisation_method(config)
    if method in DEQUANTISED:
        _need_installed(f"{source} is quantised by {method} and", ("accelerate",))
        found = config.quantization_config
        if isinstance(found, dict):
            found["dequantize"] = True
        else:
            found.dequantize = True
        return ""
    if method and method not in KEPT:
        raise FailedPrecondition(
            f"{source} is quantised by {method}, whose weights this engine does not read: serve it with vLLM "
            "(`slipstream serve --engine vllm`, VERIFIER_ENGINE=vllm) or take the model's unquantised checkpoint; "
            "--target-quantisation and --draft-quantisation make int8 or int4 of that (docs/models.md).",
            reason="QUANTISATION_UNREADABLE",
        )
    _need_installed(f"{source} is quantised by {method} and", KEPT.get(method, ()))
    return method


def find_quantiser(name: str) -> Quantiser:
    """Raises InvalidArgument for a name that is not in the table."""
    if name not in QUANTISERS:
        raise InvalidArgument(f"quantisation {name!r} is unknown; choose {', '.join(QUANTISERS)}, or leave it empty.")
    return QUANTISERS[name]


def check_target_quantisation(name: str) -> str:
    """The name itself. Raises InvalidArgument for one under which a text depends on what shares its passes."""
    if name and not find_quantiser(name).steady:
        steady = [known for known, quantiser in QUANTISERS.items() if quantiser.steady]
        raise InvalidArgument(
            f"{name} is for draft models: a target's text would depend on the sessions that share its passes; "
            f"choose {' or '.join(steady)}."
        )
    return name


def loading_options(name: str, config: Any, dtype: str, device: str) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained`: dtype, and how and where to quantise.

    Raises InvalidArgument for a choice that cannot be, FailedPrecondition for a checkpoint that is quantised already
    and for a quantiser that is not installed.
    """
    quantised_by = quantisation_method(config)
    placed_by_library = quantised_by and quantised_by not in DEQUANTISED
    # The library quantises where the weights are to stay; `to` is refused afterwards.
    placed = {"dtype": dtype, "device_map": {"": device}}
    if not name:
        return placed if placed_by_library else {"dtype": dtype}
    if quantised_by:
        raise FailedPrecondition(
            f"The checkpoint is quantised already ({quantised_by}); leave quantisation empty.", reason="QUANTISED"
        )
    _check(name, find_quantiser(name), dtype, device)
    if name == "int8-dynamic":
        return {"dtype": "float32"}
    return placed | {"quantization_config": _int8() if name == "int8" else _int4(config, dtype)}


def convert(name: str, model: Any) -> Any:
    """Finishes a loaded model: a quantiser that replaces modules does it here.

    Raises FailedPrecondition for a model without a layer that quantisers know: GPT-2's and its kin's are `Conv1D`.
    """
    head = model.get_output_embeddings()
    if name and not any(isinstance(each, torch.nn.Linear) and each is not head for each in model.modules()):
        raise FailedPrecondition(
            f"{model.config.model_type} has no layer that can be quantised here; leave quantisation empty, or serve a "
            "checkpoint that was quantised with vLLM.",
            reason="QUANTISATION_UNREADABLE",
        )
    if name != "int8-dynamic":
        return model
    try:
        with warnings.catch_warnings():
            # Deprecated in favour of torchao, whose int8 takes several times longer on a CPU.
            warnings.simplefilter("ignore")
            from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic

            return quantize_dynamic(model, {torch.nn.Linear: per_channel_dynamic_qconfig}, inplace=True)
    except (ImportError, RuntimeError) as error:
        raise FailedPrecondition(
            f"This torch cannot quantise dynamically ({error}); choose int8 or int4.", reason="QUANTISER_MISSING"
        ) from error


def plain_linear(module: torch.nn.Module) -> torch.nn.Linear | None:
    """A float32 copy of a linear layer whose weight is quantised by one of the quantisers above; None for others."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if callable(weight) and callable(bias):  # torch's dynamic layers
        numbers, bias = weight().dequantize(), bias()
    elif not isinstance(weight, torch.Tensor) or type(weight) is torch.nn.Parameter:
        return None
    elif getattr(weight, "quant_state", None) is not None:
        from bitsandbytes.functional import dequantize_4bit

        numbers = dequantize_4bit(weight.data, weight.quant_state)  # type: ignore[attr-defined]
    elif weight.is_floating_point():  # torchao's tensors say what they stand for
        numbers = weight.dequantize()
    else:
        return None
    outputs, inputs = numbers.shape
    plain = torch.nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    plain.weight = torch.nn.Parameter(numbers.detach().float(), requires_grad=False)
    if bias is not None:
        plain.bias = torch.nn.Parameter(bias.detach().float(), requires_grad=False)
    return plain


def quantisation_method(config: Any) -> str:
    """The library's name of what a checkpoint was quantised with, or nothing."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return ""
    method = found.get("quant_method", "unknown") if isinstance(found, dict) else found.quant_method
    return str(getattr(method, "value", method))


def silence_quantiser_logs() -> None:
    """Call it before transformers is imported, which imports torchao wherever that is installed."""
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def _check(name: str, quantiser: Quantiser, dtype: str, device: str) -> None:
    if dtype not in quantiser.dtypes:
        raise InvalidArgument(f"{name} does not go with dtype {dtype}; choose {' or '.join(quantiser.dtypes)}.")
    if torch.device(device).type not in quantiser.devices:
        raise InvalidArgument(f"{name} does not run on {device}; choose {' or '.join(quantiser.devices)}.")
    _need_installed(name, quantiser.packages)


def _need_installed(what: str, packages: tuple[str, ...]) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise FailedPrecondition(
            f"{what} needs {' and '.join(missing)}, which is not installed: {EXTRA}.", reason="QUANTISER_MISSING"
        )


def _int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def _int4(config: Any, dtype: str) -> Any:
    from transformers import BitsAndBytesConfig

    own = getattr(config, "dtype", None) or torch.float32
    compute = own if dtype == "auto" else getattr(torch, dtype)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
