"""Prefixes that many prompts share, with the caches that they leave, found by their tokens."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from path_attention.models.cache import (
    PathAttentionCacheLayer,
    crop_cache,
    fork_cache,
    layer_caches,
)
from path_attention.nn.cache_units import storages

_CHUNK = 2048  # tokens of a prompt that are computed at once
_PRIME, _MASK = 0x9E3779B97F4A7C15, 2**63 - 1


@dataclass
class _Entry:
    """One prefix: as a cache on the model's device, or as tensors of each layer on the host.

    shorter: the last that was had from it at a border before its end, whose tables were made anew.
    """

    keys: list[bytes]  # of its borders
    borders: list[int]  # the lengths that can be had from it
    cache: Cache | None
    layers: list[dict[str, Tensor]] | None
    shorter: Cache | None = None

    def tensors(self) -> Iterable[Tensor]:
        """All that it holds; it stays as it is, others only share it."""
        for cache in (self.cache, self.shorter):
            for layer in [] if cache is None else layer_caches(cache, len(cache.layers)):
                yield from layer.tensors()
        for named in self.layers or ():
            yield from named.values()


class PrefixStore:
    """Caches of token prefixes, by content, of one model with the weights that it has now.

    A prefix's key is a chain of SHA-256 over the model's fingerprint and one sealed unit of token
    ids after the other, so prompts that start alike find what they share, up to the last border of
    a unit. On the model's device what is found is a fork: it shares the sealed units by reference.
    The least recently used are dropped beyond a number of bytes. Rows without padding only.

    Attributes:
        model: whose prefixes these are.
        fingerprint: SHA-256 of its configuration and weights.
    """

    def __init__(
        self, model: PreTrainedModel, *, max_bytes: int | None = None, host: bool = False
    ) -> None:
        """max_bytes: None for no limit. host: keep them in the host's memory, as copies."""
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes: expected at least 0, got {max_bytes}")
        self.model, self.max_bytes, self.host = model, max_bytes, host
        self.fingerprint = fingerprint(model)
        self._unit = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # by the longest key
        self._places: dict[bytes, tuple[bytes, int]] = {}  # border's key → (entry, length)
        self._users: Counter[int] = Counter()  # address of tensors' memory → entries that hold it
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors kept, shared ones counted once; counted as they come and go."""
        return self._bytes

    def put(self, ids: Tensor, cache: Cache) -> int:
        """Keep what `cache` holds of token ids `[1, T]`, up to its last border.

        Returns the number of tokens that are kept. Raises ValueError on a batch, padding, or a
        cache of more tokens.
        """
        first = layer_caches(cache, len(cache.layers))[0]
        if ids.dim() != 2 or len(ids) != 1 or first.seen > ids.shape[1]:
            raise ValueError(
                f"ids: expected [1, {first.seen} or more], what the cache has seen, "
                f"got {list(ids.shape)}"
            )
        if not first.seen:
            return 0
        if first.lengths is None or first.lengths.tolist() != [first.seen]:
            raise ValueError("cache: expected one row without padding, got another")
        self._unit, length = first.unit, first.last_border
        keys = self._chain(ids, length)
        if not keys:
            return 0
        if keys[-1] in self._places:
            self._touch(keys[-1])
            return length
        borders = [self._unit * (n + 1) for n in range(len(keys))]
        if first.kind == "linear":
            keys, borders = keys[-1:], borders[-1:]
        fork = fork_cache(cache)
        crop_cache(fork, length)
        if self.host:
            layers = [layer.export() for layer in layer_caches(fork, len(fork.layers))]
            self._add(_Entry(keys, borders, None, [_on_host(layer) for layer in layers]))
        else:
            self._add(_Entry(keys, borders, fork, None))
        return length if keys[-1] in self._places else 0

    def get(self, ids: Tensor) -> Cache | None:
        """A cache of the longest prefix of ids `[1, T]` that is kept, the caller's own; or None."""
        key, _ = self.find(self.keys(ids))
        return None if key is None else self.open(key)

    def keys(self, ids: Tensor) -> list[bytes]:
        """The keys of the prefixes of ids `[1, T]` that end at borders; none before a `put`."""
        return self._chain(ids, ids.shape[1]) if self._unit else []

    def find(self, keys: Sequence[bytes]) -> tuple[bytes | None, int]:
        """The last of the keys whose prefix is kept, and that prefix's length; None and 0."""
        key = next((key for key in reversed(keys) if key in self._places), None)
        return key, 0 if key is None else self._places[key][1]

    def open(self, key: bytes) -> Cache:
        """A cache of the kept prefix of a key, the caller's own."""
        name, length = self._places[key]
        entry = self._entries[name]
        self._touch(key)
        if entry.shorter is not None and entry.shorter.get_seq_length() == length:
            return fork_cache(entry.shorter)
        cache = self._open(entry)
        crop_cache(cache, length)
        if entry.cache is not None and length < entry.borders[-1]:
            self._set_shorter(entry, fork_cache(cache))
            if self.max_bytes is not None and self.bytes > self.max_bytes:
                self._set_shorter(entry, None)
        return cache

    def prefill(self, ids: Tensor) -> Cache:
        """A cache of ids `[1, T]` without the last token: what is kept, and the rest computed.

        Keeps what was computed. Raises ValueError on a batch.
        """
        if ids.dim() != 2 or len(ids) != 1 or not ids.shape[1]:
            raise ValueError(f"ids: expected [1, T] with a prefix store, got {list(ids.shape)}")
        cache = self.get(ids[:, :-1])
        if cache is None:
            cache = DynamicCache(config=self.model.config)
        with torch.no_grad():
            rest = ids[:, cache.get_seq_length() : -1]
            for part in rest.split(_CHUNK, 1) if rest.shape[1] else ():
                self.model(part, past_key_values=cache, logits_to_keep=1)
        if rest.shape[1]:
            self.put(ids[:, :-1], cache)
        return cache

    def save(self, folder: str | Path) -> None:
        """Write each prefix to a file of its own in a folder, and drop files of others."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = set()
        for name, entry in self._entries.items():
            layers = entry.layers
            if entry.cache is not None:
                caches = layer_caches(entry.cache, len(entry.cache.layers))
                layers = [_on_host(cache.export()) for cache in caches]
            flat = {
                f"{n}.{key}": x for n, layer in enumerate(layers or ()) for key, x in layer.items()
            }
            told = {
                "fingerprint": self.fingerprint,
                "unit": self._unit,
                "keys": [key.hex() for key in entry.keys],
                "borders": entry.borders,
            }
            file = folder / f"{name.hex()}.safetensors"
            names.add(file.name)
            if not file.exists():
                part = file.with_suffix(".part")
                save_file(flat, part, {"path_attention.prefix": json.dumps(told)})
                part.replace(file)
        for file in folder.glob("*.safetensors"):
            if file.name not in names:
                file.unlink()

    def load(self, folder: str | Path) -> int:
        """Add the prefixes in a folder; returns how many.

        Raises ValueError on one of another model or of damaged files.
        """
        from safetensors import SafetensorError, safe_open

        added = 0
        for file in sorted(Path(folder).glob("*.safetensors")):
            try:
                with safe_open(file, "pt") as opened:
                    told = json.loads((opened.metadata() or {})["path_attention.prefix"])
                    flat = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            except (SafetensorError, KeyError, json.JSONDecodeError) as error:
                raise ValueError(f"folder: expected prefixes, {file} is none: {error}") from error
            if told["fingerprint"] != self.fingerprint:
                raise ValueError(f"folder: expected prefixes of this model, {file} is another's")
            layers: list[dict[str, Tensor]] = [
                {} for _ in range(self.model.config.num_hidden_layers)
            ]
            for name, x in flat.items():
                n, _, key = name.partition(".")
                layers[int(n)][key] = x
            keys = [bytes.fromhex(key) for key in told["keys"]]
            self._unit = told["unit"]
            entry = _Entry(keys, told["borders"], None, layers)
            if not self.host:
                entry = _Entry(keys, told["borders"], self._open(entry), None)
            self._add(entry)
            added += keys[-1] in self._places
        return added

    # --- Inside -----------------------------------------------------------------------------------

    def _chain(self, ids: Tensor, length: int) -> list[bytes]:
        """The keys of the borders of ids `[1, T]` up to a length."""
        row = ids[0, :length].to("cpu", torch.int64)
        keys, key = [], bytes.fromhex(self.fingerprint)
        for unit in row.split(self._unit):
            if len(unit) == self._unit:
                key = hashlib.sha256(key + unit.numpy().tobytes()).digest()
                keys.append(key)
        return keys

    def _open(self, entry: _Entry) -> Cache:
        if entry.cache is not None:
            return fork_cache(entry.cache)
        cache = DynamicCache(config=self.model.config)
        layers: list[Any] = [
            PathAttentionCacheLayer.from_export(x, self.model.device) for x in entry.layers or ()
        ]
        cache.layers = layers
        return cache

    def _touch(self, key: bytes) -> None:
        self._entries.move_to_end(self._places[key][0])

    def _add(self, entry: _Entry) -> None:
        name = entry.keys[-1]
        for old in entry.keys:
            if old in self._entries:
                self._drop(old)
        self._entries[name] = entry
        self._hold(entry)
        for key, length in zip(entry.keys, entry.borders, strict=True):
            self._places.setdefault(key, (name, length))
        while self.max_bytes is not None and self._entries and self.bytes > self.max_bytes:
            self._drop(next(iter(self._entries)))

    def _drop(self, name: bytes) -> None:
        entry = self._entries.pop(name)
        self._let_go(entry)
        for key in entry.keys:
            if self._places[key][0] == name:
                del self._places[key]
        for other, kept in self._entries.items():  # what it shared with others is still theirs
            for key, length in zip(kept.keys, kept.borders, strict=True):
                self._places.setdefault(key, (other, length))

    def _set_shorter(self, entry: _Entry, cache: Cache | None) -> None:
        self._let_go(entry)
        entry.shorter = cache
        self._hold(entry)

    def _hold(self, entry: _Entry) -> None:
        for at, size in storages(entry.tensors()).items():
            self._bytes += size if not self._users[at] else 0
            self._users[at] += 1

    def _let_go(self, entry: _Entry) -> None:
        for at, size in storages(entry.tensors()).items():
            self._users[at] -= 1
            if not self._users[at]:
                del self._users[at]
                self._bytes -= size


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 of a model's configuration and of a checksum of the bits of each weight."""
    told = json.dumps(model.config.to_diff_dict(), sort_keys=True, default=str)
    digest = hashlib.sha256(told.encode())
    for name, x in _weights(model):
        bits = x.detach().contiguous().flatten().view(torch.uint8)
        bits = torch.nn.functional.pad(bits, (0, -len(bits) % 4)).view(torch.int32)
        total = 0
        for n, part in enumerate(bits.split(2**22)):
            place = torch.arange(1, len(part) + 1, device=part.device, dtype=torch.int64)
            each = int((part.to(torch.int64) * (2 * place + 1)).sum())
            total = (total * _PRIME + each + n) & _MASK
        digest.update(f"{name} {x.dtype} {list(x.shape)} {total};".encode())
    return digest.hexdigest()


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _on_host(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to("cpu", copy=True).contiguous() for name, x in layer.items()}
