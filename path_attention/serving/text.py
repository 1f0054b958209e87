"""Text from tokens one by one: characters that span tokens, and stop strings, are held back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "�"  # what a decoder makes of bytes that are no character yet


class TextStream:
    """The text of an answer as its tokens come, given out once nothing can change it.

    Attributes:
        stopped: whether a stop string has come; what follows it is dropped, and it itself.
        given: characters given out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        self._from = self._read = 0  # tokens that give the context, and that were decoded
        self._held = ""
        self.stopped, self.given = False, 0

    @property
    def length(self) -> int:
        """Characters decoded so far, given out or held."""
        return self.given + len(self._held)

    def push(self, token: int) -> str:
        """The text that another token makes certain."""
        self._ids.append(token)
        return self._decode(final=False)

    def finish(self) -> str:
        """All that was held back, up to a stop string."""
        return self._decode(final=True)

    def _decode(self, final: bool) -> str:
        if self.stopped:
            return ""
        # A token's text may depend on the one before it: decode both, and take what is new.
        before = self._text(self._ids[self._from : self._read])
        now = self._text(self._ids[self._from :])
        if len(now) > len(before) and (final or not now.endswith(_REPLACEMENT)):
            self._held += now[len(before) :]
            self._from, self._read = self._read, len(self._ids)
        return self._release(final)

    def _text(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )  # pyright: ignore[reportReturnType]

    def _release(self, final: bool) -> str:
        found = [at for text in self._stop if (at := self._held.find(text)) >= 0]
        if found:
            self.stopped, at = True, min(found)
            text, self._held = self._held[:at], ""
        else:
            keep = 0 if final else max((_overlap(self._held, s) for s in self._stop), default=0)
            cut = len(self._held) - keep
            text, self._held = self._held[:cut], self._held[cut:]
        self.given += len(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of text with which stop begins."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """The bytes that a token stands for; those of its text where its tokenizer isn't byte-level."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    piece = tokenizer.convert_ids_to_tokens(token)
    if backend is not None and "ByteLevel" in str(backend.decoder) and isinstance(piece, str):
        special = token in tokenizer.all_special_ids
        if not special and all(character in _BYTES for character in piece):
            return bytes(_BYTES[character] for character in piece)
    return str(tokenizer.decode([token])).encode()


def _byte_alphabet() -> dict[str, int]:
    """The character by which byte-level tokenizers write each byte: itself if it can be printed,
    else the next beyond 255."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in shown}
    rest = [byte for byte in range(256) if byte not in shown]
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(rest)}


_BYTES = _byte_alphabet()
