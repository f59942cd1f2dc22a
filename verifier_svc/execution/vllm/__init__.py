"""The executor on vLLM's workers, for targets that need several GPUs, their kernels or quantised weights.

`executor` and its neighbours run in the verifier's process, `worker`, `step_sampler` and `session_table` in vLLM's
worker processes. Only `engine_core`, `worker` and `step_sampler` import vllm, so the package is imported on demand.
"""
