"""Compiles the fused kernels for a GPU, on a machine that has none.

usage: python -m tests.support.compiled_kernels CAPABILITY [narrow]

In a process of its own: here they are Triton's, not its interpreter's. Prints a line for each: its name, its bytes, and
how many float32 products it rounds together with a sum. `narrow`: those that unroll loops over chunks and ways unroll a
quarter of each, and compile in a third of the time.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

READ = ("*bf16", "*i64", "*fp64", "*u8", "*i32", "*fp32", "*u8", "*fp32", "*i32", "*u8")
GATHERED = ("*fp64", "*i32", "*i32", "*fp32", "*i32", "*fp32", "*i32", "*i64", "i32", "i32", "i32")
KERNELS: dict[str, tuple[tuple[Any, ...], dict[str, int]]] = {
    "survey": ((READ, "*fp32", "*fp64", "*i32", "*i32", "i32", "i32", "i32"), {"BLOCK": 4096, "GROUP": 128}),
    "prepare": (
        ("*i64", "*fp64", "*fp32", "*i32", "*i32", "*fp32", "*i32", "i32", "i32", "i32"),
        {"GROUP": 128, "GROUPS": 1024, "PARTS": 32},
    ),
    "race": ((READ, "*fp32", *GATHERED), {"BLOCK": 4096, "GROUP": 128, "CAPACITY": 8192}),
    "cut": ((READ, *GATHERED), {"CAPACITY": 8192, "CHUNK": 256, "WAYS": 64, "PARTS": 32}),
    "accept": (
        ("*i64", "*i64", "*i32", "*fp64", "*i32", "*i32", "*i32", "i32", "i32", "i32"),
        {"PARTS": 32, "PADDING": -1},
    ),
    "count": (("*i64", "*i32", "*fp32", "*i32", "i32", "i32"), {}),
}
CANDIDATES = ("*i32", "*fp32", "*i32", "*fp32", "*i32")
LISTED = ("*fp32", "*i32", "*i32")
RANKING: dict[str, tuple[tuple[Any, ...], dict[str, int]]] = {
    "gather": (
        (READ, "*fp32", *CANDIDATES, "*i64", "fp32", "i32", "i32", "i32"),
        {"BLOCK": 4096, "GROUP": 32, "CAPACITY": 8192},
    ),
    "shortlist": (
        (READ, *CANDIDATES, *LISTED, "i32", "i32"),
        {"CAPACITY": 8192, "CHUNK": 256, "WAYS": 64, "SHORT": 256},
    ),
    "finish": (
        ("*i64", "*fp64", "*fp32", "*i64", *LISTED, "*i64", "*fp32", "fp32", "i32", "i32"),
        {"PARTS": 64, "SHORT": 256, "PAIRS": 16},
    ),
}


NARROW = {"CHUNK": 64, "WAYS": 16}


def main(capability: int, *how: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    torch.cuda.is_available = lambda: True
    from slipstream.engine.kernels import fused_ranking, fused_sampling

    for name, (types, given) in (KERNELS | RANKING).items():
        constants = given | {each: NARROW[each] for each in NARROW if each in given and "narrow" in how}
        kernel = getattr(fused_ranking if name in RANKING else fused_sampling, name)
        variable = [each for each in kernel.arg_names if each not in constants]
        signature = dict(zip(variable, types, strict=True)) | dict.fromkeys(constants, "constexpr")
        places = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
        source = ASTSource(kernel, signature, places)
        options = {"enable_fp_fusion": False, "num_warps": 8}
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        print(name, len(made.asm["cubin"]), len(re.findall(r"\bfma\.rn\.f32", made.asm["ptx"])), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
