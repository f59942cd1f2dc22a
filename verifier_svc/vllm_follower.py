"""`python -m verifier_svc.vllm_follower`: the vLLM workers of one further machine, for a verifier on another.

It has the verifier's settings (`VERIFIER_*`), with `--node-rank` 1 or above in VERIFIER_VLLM_ARGS, and ends with the
verifier: with status 1, so that whoever runs the group starts it again.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import tempfile
import threading
import time
from pathlib import Path

from slipstream.config import from_env
from slipstream.errors import InvalidArgument, SlipstreamError, Unavailable
from slipstream.process import exit_on_error
from slipstream.telemetry import logs
from slipstream.tokenizer.vocabulary import check_folder
from verifier_svc.config import PREFIX, VerifierConfig
from verifier_svc.execution.vllm.engine_core import wait_for_end
from verifier_svc.execution.vllm.engine_options import engine_config, nodes_of, prepare_vllm, refusal
from verifier_svc.execution.vllm.node_link import FollowerLink

log = logging.getLogger("verifier_svc.vllm_follower")


def follow(config: VerifierConfig) -> None:
    """Runs this machine's workers until the leader or one of them ends, which raises Unavailable.

    Raises what `prepare_vllm` and `FollowerLink` raise, and FailedPrecondition for workers that cannot start.
    """
    from slipstream.engine.models.checkpoint import describe_checkpoint

    prepare_vllm(config)
    model = describe_checkpoint(config.model)
    with tempfile.TemporaryDirectory(prefix="slipstream-vllm-") as folder:
        failures = Path(folder) / "failure"
        try:
            vllm_config, shared = engine_config(config, model, failures)
        except SlipstreamError:
            raise
        except Exception as error:
            raise refusal(error, failures) from error
        nodes = nodes_of(vllm_config)
        if not nodes.rank:
            raise InvalidArgument("A follower needs --node-rank, 1 or above, in VERIFIER_VLLM_ARGS.")
        link = FollowerLink(nodes, shared)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # The leader's sessions may need its grace time, and this node with it. It ends when the leader does.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        lost = threading.Event()
        threading.Thread(target=_end_with_leader, args=(link, lost), daemon=True).start()
        why = ""
        try:
            from vllm.v1.executor.multiproc_executor import MultiprocExecutor

            executor = MultiprocExecutor(vllm_config, monitor_workers=False)
            log.info("node %d of %d runs", nodes.rank, nodes.size)
            why = wait_for_end(executor.workers)
            why = "the leader is gone" if lost.is_set() else why
        except Exception as error:
            failed = refusal(error, failures)
            why = failed.message
            if not lost.is_set():
                raise failed from error
            why = "the leader is gone"
        finally:
            link.close(why)
            _kill_workers()
        raise Unavailable(why, reason="WORKER_LOST")


def _end_with_leader(link: FollowerLink, lost: threading.Event) -> None:
    link.wait_until_lost()
    lost.set()
    while True:  # workers may be starting
        _kill_workers()
        time.sleep(0.2)


def _kill_workers() -> None:
    for worker in multiprocessing.active_children():
        with contextlib.suppress(ValueError, OSError):
            worker.kill()


def main() -> None:
    with exit_on_error("verifier"):
        config = from_env(VerifierConfig, PREFIX)
        logs.configure("verifier", config.log_level, config.log_format)
        check_folder(config.model)
        follow(config)


if __name__ == "__main__":
    main()
