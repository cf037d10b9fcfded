"""Ids into text as they come, without ever showing a part of a character."""

from collections.abc import Callable, Sequence

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """`push` takes an id and returns the text that is now certain; `flush` returns the rest.

    All that is returned, joined, is the decoded text of all ids. (Bytes that are no UTF-8, which a young model gives,
    may be told apart differently where they have tokens of their own.)
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        """decode: ids to text. context: ids before the first, because some tokenizers drop a leading space."""
        self._decode = decode
        self._ids = list(context)
        self._begin = len(self._ids)  # of the ids whose text is not all shown
        self._shown = len(decode(self._ids))

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        # Bytes that are no whole character decode as U+FFFD: one for all of a byte-level tokenizer's, one each where
        # bytes have tokens of their own. More bytes may still turn those at the end into a character.
        end = len(text.rstrip(UNFINISHED))
        fresh = text[self._shown : end]
        self._shown = max(self._shown, end)
        if end == len(text):
            # What was shown last stays as the context of what comes; it began where a character did.
            self._ids = self._ids[self._begin :]
            self._begin = len(self._ids)
            self._shown = len(self._decode(self._ids))
        return fresh

    def flush(self) -> str:
        text = self._decode(self._ids)
        fresh = text[self._shown :]
        self._shown = len(text)
        return fresh
