"""A session that somebody here listens to, whoever runs it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.sessions.outcome import finished_of, rolled_back
from gateway.sessions.output_stream import OutputStream
from gateway.sessions.run import SessionRun
from gateway.store.session_log import SessionLog
from gateway.store.session_store import SessionRecord


@dataclass(slots=True, eq=False)
class SessionEntry:
    story: OutputStream
    owner: str
    """The API key that it belongs to."""
    params: bytes
    """What it was asked for: another record is another session, even if it begins like this one."""
    epoch: int
    """Of the record as it was last seen or written here."""
    task: asyncio.Task[None] | None = None
    """That feeds the story."""
    session: SessionRun | None = None
    """While it runs here."""
    output_here: int = 0
    """Tokens that were said here."""
    stopping: bool = False

    def stop(self) -> None:
        """The task ends soon, having let the session go. Once: what it does last must not be interrupted."""
        if self.task is not None and not self.stopping:
            self.stopping = True
            if self.session is None or not self.session.ending:
                self.task.cancel()

    async def run(self, session: SessionRun, log: SessionLog) -> None:
        """Until the session ended, or another owner has it: raises Aborted then."""
        before, self.session = len(self.story.tokens), session
        try:
            await session.run()
        finally:
            self.session = None
            self.output_here += len(self.story.tokens) - before
            self.epoch = log.epoch_written

    def hear(self, record: SessionRecord) -> bool:
        """Tells the story what the record has more; whether the session goes on. A log that is shorter than what was
        told has lost it: then it says it again."""
        story, output = self.story, record.tokens[record.prompt_length :]
        both = min(len(output), len(story.tokens))
        same = next((place for place in range(both) if output[place] != story.tokens[place]), both)
        if same < both or record.params != self.params:
            story.fail(rolled_back(same))
            return False
        self.epoch = record.epoch
        if output[both:]:
            story.tell(output[both:])
        if record.outcome:
            story.conclude()
            finished = finished_of(record)
            finished.output_tokens = min(finished.output_tokens, story.transcript.carrying())
            story.finish(finished)
        return not record.outcome
