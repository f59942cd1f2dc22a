"""A session that somebody here listens to, whoever runs it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.outcome import finished_of
from gateway.session import Session
from gateway.store.record import Record
from gateway.story import Story
from slipstream.errors import Aborted, Unavailable

ROLLED_BACK = "ROLLED_BACK"


@dataclass(slots=True, eq=False)
class Known:
    story: Story
    owner: str
    """The API key that it belongs to."""
    params: bytes
    """What it was asked for: another record is another session, even if it begins like this one."""
    task: asyncio.Task[None] | None = None
    """That feeds the story."""
    session: Session | None = None
    """Where it runs here."""
    said: int = 0
    """Tokens that were there before it ran here."""
    stopping: bool = False

    @property
    def output_here(self) -> int:
        """Tokens that were said here."""
        return len(self.story.tokens) - self.said if self.session is not None else 0

    def stop(self) -> None:
        """The task ends soon, having let the session go. Once: what it does last must not be interrupted."""
        if self.task is not None and not self.stopping and not (self.session is not None and self.session.ending):
            self.stopping = True
            self.task.cancel()

    def hear(self, record: Record, epoch: int) -> bool:
        """Tells the story what the record has more; whether the session goes on. A log that is shorter than what was
        told has lost it, or was rolled back: then its epoch is a later one than `epoch`."""
        story, output = self.story, list(record.tokens[record.prompt_length :])
        both = min(len(output), len(story.tokens))
        shorter = both < len(story.tokens) and record.epoch > epoch
        if output[:both] != story.tokens[:both] or shorter or record.params != self.params:
            story.fail(rolled_back(both))
            return False
        story.tell(output[both:])
        if record.outcome:
            story.conclude()
            finished = finished_of(record)
            finished.output_tokens = min(finished.output_tokens, story.transcript.carrying())
            story.finish(finished)
        return not record.outcome


def rolled_back(output_tokens: int) -> Aborted:
    return Aborted(f"The session was rolled back to {output_tokens} output tokens; resume there.", reason=ROLLED_BACK)


def suspended() -> Unavailable:
    return Unavailable("The gateway let the session go; resume it.", reason="SUSPENDED")
