"""Requests of `slipstream train draft`, `medusa` and `eagle`: a TOML file, and the command's options over it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from slipstream.errors import InvalidArgument, NotFound
from training.settings import Budget, Optimisation, Schedule

KINDS = ("draft", "medusa", "eagle")
LOSSES = ("kl", "tv", "lk")
POSITIVE = (
    *("steps", "rows", "depth", "answer_tokens", "answer_epochs", "prompt_tokens", "held_out_answers", "tree_nodes"),
)
"""Settings that are at least 1."""


@dataclass(frozen=True)
class TrainRequest:
    """One run. Every field is a key of the TOML file; a kind does not read what belongs to another."""

    kind: str
    target: str
    """Folder or hub id of the target."""
    out: str
    """Folder of what is trained; checkpoints and the report go to a folder beside it."""
    data: str = ""
    """A folder of texts, or a file of JSONL or of one prompt for each line; empty: the Python standard library."""
    steps: int = 2000
    minutes: float = 0.0
    """Training time in place of `steps`, which then limits what is read of the texts; such a run does not repeat."""
    rows: int = 4
    window: int = 512
    """Tokens of a row; longer texts become several rows."""
    rate: float = 1.0
    """Factor of the learning rates."""
    seed: int = 17
    device: str = "auto"
    """`auto` (the first GPU, else the CPU), `cpu`, `cuda` or `cuda:N`."""
    dtype: str = "auto"
    """Type in which the target is computed: `auto`, `float32`, `bfloat16` or `float16`."""
    checkpoint_minutes: float = 5.0
    evaluate_steps: int = 200

    answers: int = 500
    """Most texts for training that the target writes itself: answers to prompts first, then continuations of texts."""
    answer_tokens: int = 192
    prompt_tokens: int = 64
    """Tokens of a text that become a prompt."""
    temperature: float = 1.0
    """Temperature of the answers for training; those that the result is measured on are greedy."""
    answer_minutes: float = 0.0
    """Most minutes that the target writes answers for training; 0: until all are there."""
    answers_at_once: int = 0
    """Answers that the target writes at once; 0: 32 on a CPU, 256 on a GPU."""
    answer_epochs: int = 4
    """Most times that the same answers are learned, where texts were given too."""
    held_out: float = 0.05
    """Share of the texts that the result is measured on."""
    held_out_answers: int = 48
    tree_nodes: int = 16
    """Candidates of a pass for which the best checkpoint is chosen."""

    depth: int = 4
    """Tokens ahead: Medusa's heads, passes of EAGLE's training-time test, candidates in a row of a draft model."""
    decay: float = 0.8
    """Weight of a depth's loss relative to that of the one before."""
    late_loss: str = "tv"
    """Loss of `draft` and `eagle` in the last part of the steps: tv or lk; kl changes nothing."""
    late_from: float = 0.7

    start: str = ""
    """`draft`: folder of a model to start from; empty: a fresh Llama of `layers`, `hidden` and `feed_forward`."""
    sliding_window: int = 0
    """`draft`: tokens that the model sees; 0: a fresh one those of a row, one to start from those it saw before. Small
    models lose contexts that are longer than their rows: one that was trained on rows of 192 tokens agreed with its
    target on 76 % of the tokens in them, on 21 % of those behind 768, and on 74 % of these with a window of 192."""
    layers: int = 2
    hidden: int = 128
    feed_forward: int = 0
    """Width inside a fresh draft model's or EAGLE's feed-forward layer; 0: four times `hidden`, or the target's."""
    aux_layers: tuple[int, ...] = ()
    """`eagle`: layers of the target that are read; none: an early, a middle and a late one."""
    draft_vocabulary: int = 0
    """`eagle`: the most frequent tokens that its output knows; 0: all."""
    learn_output: bool = True
    """`eagle`: the output layer, which starts as the target's rows, learns too. Without, a step takes a quarter less,
    and a few hundred steps do not spoil it."""
    kv_heads: int = 0
    """`eagle`: heads of keys and values; 0: the target's. What a head of version 3 learns of the newest token passes
    through its values: few of them leave little room for it."""
    version: int = 3
    """`eagle`: 3, or 1 for a layer that reads the last hidden state and has the target's output."""
    own_outputs: bool = False
    """`medusa`: each head gets an output matrix of its own, which starts as the target's; else they share it."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidArgument(f"{self.kind!r} is none of the kinds {', '.join(KINDS)}.")
        if self.late_loss not in LOSSES:
            raise InvalidArgument(f"late_loss is {self.late_loss!r}; it is one of {', '.join(LOSSES)}.")
        if self.version not in (1, 3):
            raise InvalidArgument(f"version is {self.version}; EAGLE heads are trained in version 1 or 3.")
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.window < self.depth + 3:
            raise InvalidArgument(f"window is {self.window} tokens; {self.depth} tokens ahead need more.")

    @property
    def name(self) -> str:
        return self.kind

    @property
    def budget(self) -> Budget:
        return Budget(self.minutes, None if self.minutes else self.steps)

    @property
    def schedule(self) -> Schedule:
        return Schedule(peak=self.rate)

    @property
    def optimisation(self) -> Optimisation:
        return Optimisation()

    @property
    def workplace(self) -> Path:
        """Folder of answers, checkpoints and the report."""
        out = Path(self.out)
        return out.with_name(f"{out.name}-training")


def read_request(kind: str, config: Path | None, options: Mapping[str, object]) -> TrainRequest:
    """The file's values, overridden by the options that are not None. Raises InvalidArgument for keys and values that
    no request has, NotFound without the file."""
    values: dict[str, object] = {}
    if config is not None:
        try:
            values = tomllib.loads(config.read_text(encoding="utf-8"))
        except OSError as error:
            raise NotFound(f"{config} cannot be read: {error.strerror}.", reason="FILE_MISSING") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"{config} is no TOML: {error}.") from error
    values |= {name: value for name, value in options.items() if value is not None}
    known = {field.name: field for field in fields(TrainRequest) if field.name != "kind"}
    made: dict[str, object] = {}
    for name, value in values.items():
        if name not in known:
            raise InvalidArgument(f"{name} is no setting of training; there are {', '.join(known)}.")
        made[name] = _typed(name, str(known[name].type), value)
    for name in ("target", "out"):
        if not made.get(name):
            raise InvalidArgument(f"give --{name}, or {name} in the configuration.")
    return TrainRequest(kind=kind, **made)  # type: ignore[arg-type]


def _typed(name: str, wanted: str, value: object) -> object:
    if wanted.startswith("tuple") and isinstance(value, list | tuple) and all(type(each) is int for each in value):
        return tuple(value)
    if wanted == "float" and type(value) is int:
        return float(value)
    if type(value).__name__ != wanted:
        raise InvalidArgument(f"{name} is {value!r}; it must be of type {wanted}.")
    return value
