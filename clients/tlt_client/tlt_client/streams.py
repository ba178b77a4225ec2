"""From the bytes of a streamed /generate response to chunks.

SGLang sends `data: {...}` events. By default each repeats everything so far; a server started with incremental
streaming sends only what is new; and the last event of a request that was aborted while it waited repeats the text but
only the last token. One rule reads all three: the new tokens are the last ones of an event, as many as
`completion_tokens` grew.
"""

from tlt_client import errors
from tlt_client.flow import Close, Flow, Policy, Reply, Sample
from tlt_client.rollouts import Chunk, Rollout
from tlt_client.wire import Answer, Meta, build_rollout, logprobs_of, read_answer


class EventSplitter:
    """Cuts a byte stream into the payloads of its `data:` lines.

    Lines end at b"\\n" only. httpx's `iter_lines` ends them wherever `str.splitlines` does, U+2028 and U+0085 included,
    which stand unescaped in the JSON of a generated text.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class ChunkReader:
    """Reads one streamed rollout."""

    def __init__(self, logprobs: bool, resamples: int) -> None:
        self.done = False
        self._wanted = logprobs
        self._resamples = resamples
        self._events = EventSplitter()
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._text = ""

    def feed(self, piece: bytes) -> list[Chunk]:
        """The chunks that `piece` completes. Raises what the server reports, and ProtocolError."""
        chunks = []
        for event in self._events.feed(piece):
            if self.done:
                break
            if event == b"[DONE]":
                self.end()
            if (chunk := self._chunk(*read_answer(event))) is not None:
                chunks.append(chunk)
        return chunks

    def end(self) -> None:
        """The stream is over: raises ConnectionLost unless the rollout is."""
        if not self.done:
            raise errors.ConnectionLost(f"the stream ended after {len(self._tokens)} tokens, before the rollout did")

    def _chunk(self, answer: Answer, meta: Meta, output_ids: list[int]) -> Chunk | None:
        fresh = meta.completion_tokens - len(self._tokens)
        if not 0 <= fresh <= len(output_ids):
            raise errors.ProtocolError(
                f"an event with {len(output_ids)} `output_ids` takes `completion_tokens` "
                f"from {len(self._tokens)} to {meta.completion_tokens}"
            )
        text = self._new_text(answer.text or "", len(output_ids), meta)
        tokens = output_ids[len(output_ids) - fresh :]
        logprobs = self._new_logprobs(meta, tokens) if self._wanted else ()
        self._tokens += tokens
        self._text += text
        self._logprobs += logprobs
        self.done = meta.finish_reason is not None
        if not (tokens or text or self.done):
            return None
        return Chunk(tuple(tokens), text, logprobs if self._wanted else None, self._whole(meta) if self.done else None)

    def _new_text(self, text: str, output_ids: int, meta: Meta) -> str:
        aborted_waiting = meta.prompt_tokens is None  # the one event without it
        if output_ids != meta.completion_tokens and not aborted_waiting:
            return text
        if not text.startswith(self._text):
            raise errors.ProtocolError(f"an event repeats the text otherwise: {self._text[-40:]!r} is not in it")
        return text[len(self._text) :]

    def _new_logprobs(self, meta: Meta, tokens: list[int]) -> tuple[float, ...]:
        entries = meta.output_token_logprobs
        return logprobs_of(entries and entries[max(len(entries) - len(tokens), 0) :], tokens)

    def _whole(self, meta: Meta) -> Rollout:
        logprobs = tuple(self._logprobs) if self._wanted else None
        return build_rollout(meta, tuple(self._tokens), self._text, logprobs, self._resamples)


class Streaming:
    """One streamed rollout. `more` gives the next chunks, and none at the end.

    Until the first chunk a failed request is sent again as any other. After it the caller has seen tokens that no
    second request would repeat, so a failure is raised.
    """

    def __init__(self, policy: Policy, sample: Sample) -> None:
        self._policy = policy
        self._sample = sample
        self.reply: Reply | None = None
        """Open from the first chunk on: whoever runs this closes it."""
        self._reader = ChunkReader(sample.logprobs, 0)

    def more(self) -> Flow[list[Chunk]]:
        if self.reply is None:
            return (yield from self._policy.sample(self._sample, self._open))
        if self._reader.done:
            return []
        try:
            return (yield from self._next(self.reply))
        except (errors.ConnectionLost, errors.Timeout, errors.ProtocolError):
            yield from self._policy.abort(self._sample.rid)
            raise

    def _open(self, sample: Sample) -> Flow[list[Chunk]]:
        self._reader = ChunkReader(sample.logprobs, sample.resamples)
        reply = yield from self._policy.open(sample.call(stream=True))
        try:
            chunks = yield from self._next(reply)
        except errors.TltClientError:
            yield Close(reply)
            raise
        self.reply = reply
        return chunks

    def _next(self, reply: Reply) -> Flow[list[Chunk]]:
        while True:
            piece = yield from self._policy.read(reply, self._sample.until)
            if not piece:
                self._reader.end()
                return []
            if chunks := self._reader.feed(piece):
                return chunks
