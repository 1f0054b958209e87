"""Text from tokens one by one: characters that span tokens, and stop strings, are held back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from path_attention.models.generation import prompt_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "�"  # what a decoder makes of bytes that are no character yet
_OPEN = 3  # so many of them, at a text's end, may be the beginning of one
_MOST, _KEPT = 16, 8  # tokens that may wait for a character to be whole, and then go on waiting


class TextStream:
    """The text of an answer as its tokens come, given out once nothing can change it.

    As a whole it is `models.generation.decode_answer`'s: read with the prompt's end before it, so
    that a blank at its start stays.

    Attributes:
        stopped: whether a stop string has come; what follows it is dropped, and it itself.
        given: characters given out.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: tuple[str, ...] = (),
        prompt: Sequence[int] = (),
    ) -> None:
        """prompt: the tokens that the text goes on with; none where it starts one."""
        self._tokenizer, self._stop = tokenizer, stop
        self._ids = prompt_end(tokenizer, prompt)
        # Of `_ids`, the newest tokens: those of text that was whole, and characters taken.
        self._head = self._text(self._ids)  # of the prompt, until there is text behind it
        self._read, self._shown = len(self._ids), len(self._head)
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
        now = self._text(self._ids)
        if not now.startswith(self._head):  # bytes of a character are on both sides
            self._ids, self._read, self._shown, self._head = self._ids[self._read :], 0, 0, ""
            now = self._text(self._ids)
        known = self._shown
        if len(now) > known and (final or not now.endswith(_REPLACEMENT)):
            known, kept = len(now), self._ids[self._read :]
            self._read = len(kept)
        elif len(self._ids) - self._read > _MOST:  # no character has so many tokens
            known, kept = max(known, len(now) - _OPEN), self._ids[-_KEPT:]
            self._read = 0
        else:
            return self._release(final)
        self._head, self._held = "", self._held + now[self._shown : known]
        self._ids, self._shown = kept, len(self._text(kept)) - (len(now) - known)
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


class Names:
    """What the API calls each token, found out once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
        self._special = frozenset(tokenizer.all_special_ids)
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, str] = {}

    def bytes(self, token: int) -> bytes:
        """The bytes that a token stands for within a text; a special one's name."""
        if token not in self._bytes:
            self._bytes[token] = self._find(token)
        return self._bytes[token]

    def name(self, token: int) -> str:
        """A token as text, or as OpenAI writes one that is a part of a character."""
        if token not in self._names:
            raw = self.bytes(token)
            try:
                self._names[token] = raw.decode()
            except UnicodeDecodeError:
                self._names[token] = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return self._names[token]

    def _find(self, token: int) -> bytes:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if token in self._special or not isinstance(piece, str):
            return str(self._tokenizer.decode([token])).encode()
        if "ByteLevel" in self._decoder and all(character in _BYTES for character in piece):
            return bytes(_BYTES[character] for character in piece)
        if "ByteFallback" in self._decoder and re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes.fromhex(piece[3:5])
        # Behind itself: some decoders drop the blank that a text's first token begins with.
        once, twice = (str(self._tokenizer.decode([token] * n)) for n in (1, 2))
        return twice[len(once) :].encode()


def _byte_alphabet() -> dict[str, int]:
    """The character by which byte-level tokenizers write each byte: itself if it can be printed,
    else the next beyond 255."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in shown}
    rest = [byte for byte in range(256) if byte not in shown]
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(rest)}


_BYTES = _byte_alphabet()
