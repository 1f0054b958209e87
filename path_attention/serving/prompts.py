"""Token ids of what clients send."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, NamedTuple

from path_attention.models.generation import encode_prompt
from path_attention.serving.request import Refused
from path_attention.serving.text import Names, TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# For a tokenizer without a chat template: docs/how-to-serve.md.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "assistant:"
)


class Echo(NamedTuple):
    """A prompt as a completion tells it again."""

    text: str
    offsets: list[int]  # of its tokens


class Prompts:
    """A tokenizer for the API's threads, one at a time, with a chat template.

    Attributes:
        has_template: whether the tokenizer brought one; else it is `PLAIN_TEMPLATE`.
        names: of its tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)  # the engine's own is not for two threads
        self.names = Names(self.tokenizer)
        self._turn = threading.Lock()
        self.has_template = tokenizer.chat_template is not None
        if not self.has_template:
            self.tokenizer.chat_template = PLAIN_TEMPLATE

    def encode(self, prompt: str | list[int] | list[dict[str, str]]) -> list[int]:
        """Ids of a text, of ids as they are, or of a chat up to where the answer starts."""
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            return prompt  # pyright: ignore[reportReturnType]
        try:
            with self._turn:
                return encode_prompt(self.tokenizer, prompt)[0].tolist()  # pyright: ignore
        except ValueError as error:
            raise Refused(str(error), param="prompt") from error
        except Exception as error:  # what a template raises about messages that it can't take
            if type(error).__module__.split(".")[0] != "jinja2":
                raise
            raise Refused(f"messages: {error}", param="messages") from error

    def echo(self, prompt: str | list[int], ids: list[int]) -> Echo:
        """A prompt's text, and where in it each of its tokens begins."""
        stream, offsets, text = TextStream(self.tokenizer), [], ""
        typed = prompt if isinstance(prompt, str) else ""
        special, shown = frozenset(self.tokenizer.all_special_ids), 0
        with self._turn:
            for token in ids:
                offsets.append(stream.length + shown)
                text += stream.push(token)
                # A special token has no text of its own, but a text may name it.
                if token in special and typed.startswith(self.names.name(token), offsets[-1]):
                    shown += len(self.names.name(token))
            text += stream.finish()
        return Echo(prompt if isinstance(prompt, str) else text, offsets)
