"""The target: on this process alone, or on several ranks of which one decides and the others compute along."""

from __future__ import annotations

import signal
from functools import partial

import torch

from slipstream.engine.engine import Engine
from slipstream.engine.group import Place
from slipstream.engine.opening import EMULATED, open_engine
from slipstream.engine.quantisation import for_target, hush
from slipstream.engine.spread import Spread
from slipstream.errors import InvalidArgument
from verifier_svc.config import VerifierConfig


def open_target(config: VerifierConfig) -> Engine:
    """Under `torchrun` it is the leader's: the other ranks `follow`."""
    place, quantisation = Place.told(), for_target(config.quantisation)
    if place.size > 1:
        return _open_rank(config, place)
    return open_engine(config.model, config.dtype, config.kv_tokens, quantisation, _spread(config, place))


def follow(config: VerifierConfig, place: Place) -> None:
    """The life of a rank that does not lead. It ends when its leader says so, or with GroupLost when that is gone:
    signals that are sent to all ranks are the leader's to answer."""
    torch.set_num_threads(config.threads)
    engine = _open_rank(config, place)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    engine.follow()


def _open_rank(config: VerifierConfig, place: Place) -> Engine:
    if config.model.startswith(EMULATED):
        raise InvalidArgument(f"{config.model} has no weights to cut; start it without torchrun.")
    hush()
    from slipstream.engine.checkpoint import load_checkpoint
    from slipstream.engine.parallel import Patience, open_rank

    load = partial(
        load_checkpoint,
        config.model,
        config.dtype,
        quantisation=for_target(config.quantisation),
        spread=_spread(config, place),
    )
    patience = Patience(config.group_start_s, config.group_timeout_s)
    return open_rank(place, patience, lambda device: load(device=str(device)), config.kv_tokens)


def _spread(config: VerifierConfig, place: Place) -> Spread:
    return Spread(place.size, config.device_map, config.device_memory, config.offload_folder)
