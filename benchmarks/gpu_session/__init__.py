"""Fifteen minutes on one GPU, prepared: `python -m benchmarks.gpu_session OUT`.

Each part runs in a process of its own with a time limit, in the order of what is wanted most, and leaves
`OUT/PART.json`; `OUT/page.md` shows them all. A part that fails or takes too long costs the others nothing. With
`--device cpu --small` parts compute on the CPU and kernels in Triton's interpreter: so they are tested, and no figure
of that means anything.
"""
