"""Ids into text as they come, without ever showing a part of a character."""

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """`push` takes an id and returns the text that is now certain; `flush` returns the rest.

    All that is returned, joined, is the decoded text of all ids.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        """decode: ids to text. context: ids before the first, because some tokenizers drop a leading space."""
        self._decode = decode
        self._ids = list(context)
        self._shown = len(decode(self._ids))

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        # Bytes that are no whole character decode as one U+FFFD each run. Only the last may still become something
        # else: what is before it has been followed by bytes that it could not take in.
        whole = not text.endswith(UNFINISHED)
        end = len(text) - (0 if whole else 1)
        fresh = text[self._shown : end]
        self._shown = max(self._shown, end)
        if whole:
            self._ids = [token]
            self._shown = len(self._decode(self._ids))
        return fresh

    def flush(self) -> str:
        text = self._decode(self._ids)
        fresh = text[self._shown :]
        self._shown = len(text)
        return fresh
