"""models/README.md: what the pair is, how it was made, and the figures recorded at the end of training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training.corpus import TrainingCorpus
from training.evaluate import Evaluation
from training.settings import Settings, TrainingStage
from training.trainer import Position

CARD = """\
# A small trained pair

`target/` and `draft/` are two Llama checkpoints with one tokenizer: the model that decides and the model that guesses.
Both were trained by `slipstream train`, on nothing but the corpus below. They write plausible Python, are good for
trying and measuring speculative decoding without a download, and for nothing else. The weights are under the project's
licence.

End a prompt with a word or a sign, not with a line break or blanks: a line break and the indentation after it are one
token, so a prompt that ends in a bare line break says that the next line is not indented.

| | target | draft |
|---|---|---|
{rows}

On {positions:,} positions of held-out files ({bytes_per_token:.2f} bytes per token):

| how often a guess agrees | |
|---|---|
| greedy agreement (both argmax equal) | {agreement:.3f} |
| 1 - TV, temperature 1 (rejection sampling) | {overlap:.3f} |
| 1 - TV, temperature 0.7 | {cooler:.3f} |
| coupled, temperature 1 ({coupled_positions:,} positions) | {coupled:.3f} |

`coupled` is the acceptance of two Gumbel races with shared noise, sum_i 1 / sum_j max(p_j / p_i, q_j / q_i)
([Daliri et al. 2024](https://arxiv.org/abs/2408.07978)).

## How it was made

    {command}

- Corpus: {corpus}, licence {licence}; {documents:,} files, {stream_tokens:,} tokens. {held_out} whole files
  (chosen by a hash of their path) were held out, from the tokenizer too. Left out: installed packages, generated
  tables, duplicates, files that are not UTF-8.
- Tokenizer: byte-level BPE, {vocabulary:,} tokens, no normaliser, no prefix space: every text decodes to itself.
  Token 0 `<|endoftext|>` ends a file and stands between files in training. Nothing is added to a prompt; training
  windows start anywhere, so a prompt from the middle of a file is a natural one.
- Target: cross-entropy. Drafter: KL(target || drafter) at temperature 1 on the same text.
- Muon on the matrices inside the layers, AdamW on embedding and norms; bf16 arithmetic, fp32 master weights; learning
  rate constant, then down to 0 over the last {decay:.0%} of the time.
- Windows of {window} tokens, {long_window} in the last {long_part:.0%}. Nothing was learnt about contexts beyond
  {long_window} tokens, although the configuration allows {context:,}.
- Seed {seed}. It fixes data order and initial weights; how many steps fit into the minutes is not fixed. With `--steps`
  and `--draft-steps` a run repeats exactly on the same machine.
"""


@dataclass(frozen=True)
class TrainingRecord:
    """Everything the card states; `sizes` and `ends` are (target, draft)."""

    settings: Settings
    corpus: TrainingCorpus
    evaluation: Evaluation
    sizes: tuple[int, int]
    ends: tuple[Position, Position]
    stream_tokens: int
    command: str


def write_card(record: TrainingRecord, path: Path) -> None:
    """Write the card as Markdown."""
    path.write_text(render_card(record), encoding="utf-8")


def render_card(record: TrainingRecord) -> str:
    """The card's Markdown."""
    found, settings, stage = record.evaluation, record.settings, record.settings.target
    return CARD.format(
        rows="\n".join(_rows(record)),
        positions=found.positions,
        bytes_per_token=found.bytes_per_token,
        agreement=found.greedy_agreement,
        overlap=found.overlap,
        cooler=found.overlap_cooler,
        coupled=found.coupled,
        coupled_positions=found.coupled_positions,
        command=record.command,
        corpus=record.corpus.name,
        licence=record.corpus.licence,
        documents=len(record.corpus.train),
        held_out=len(record.corpus.held_out),
        stream_tokens=record.stream_tokens,
        vocabulary=settings.vocabulary,
        decay=1.0 - stage.schedule.decay_from,
        window=stage.window,
        long_window=stage.long_window,
        long_part=1.0 - stage.long_from,
        context=stage.shape.context,
        seed=settings.seed,
    )


def _rows(record: TrainingRecord) -> list[str]:
    found, (target, draft) = record.evaluation, record.ends
    losses = (found.target_loss, found.draft_loss)
    lines = [
        ("parameters", *(f"{size / 1e6:.2f} M" for size in record.sizes)),
        ("shape", *(_shape(stage) for stage in (record.settings.target, record.settings.draft))),
        ("held-out loss, nats per token", *(f"{loss:.3f}" for loss in losses)),
        ("held-out bits per byte", *(f"{found.bits_per_byte(loss):.3f}" for loss in losses)),
        ("tokens seen", *(f"{end.tokens / 1e6:.2f} M" for end in (target, draft))),
        ("steps", *(f"{end.step:,}" for end in (target, draft))),
        ("minutes, one CPU core", *(f"{end.seconds / 60:.0f}" for end in (target, draft))),
    ]
    return [f"| {label} | {left} | {right} |" for label, left, right in lines]


def _shape(stage: TrainingStage) -> str:
    shape = stage.shape
    return f"{shape.layers} x {shape.hidden}, {shape.heads}/{shape.kv_heads} heads, MLP {shape.feed_forward}"
