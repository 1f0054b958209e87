"""Runs Gluon kernels on a CPU: partitions as threads of one program, in an order drawn at random.

Triton's interpreter knows no Gluon. Here each partition of a program runs until it meets a barrier,
an asynchronous copy or a matrix product; then another one goes on, drawn by the seed. Copies land
some time after they were started, products read shared memory when they are waited for, and both
look whether what they read is what was there when they were started. So a missing wait, a missing
fence, a buffer that is overwritten too early and a deadlock are errors here, not luck. Layouts are
taken as they come: the compiler checks them.
"""

from __future__ import annotations

import random
import threading
import types
from typing import Any

import torch
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.language import constexpr

LATE = 0.9  # how often a partition goes on although a copy could land
DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64")


class Emulator:
    """Stands in for a kernel: `Emulator(kernel)[grid](*args, **constants)`."""

    def __init__(self, kernel: GluonJITFunction, seed: int = 0):
        self.kernel, self.random = kernel, random.Random(seed)

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **kwargs: self._launch(grid, args, kwargs)

    def _launch(self, grid: tuple[int, ...], args: tuple, kwargs: dict) -> None:
        kwargs = {n: x for n, x in kwargs.items() if n not in ("num_warps", "maxnreg")}
        names = [p.name for p in self.kernel.params]
        bound = dict(zip(names, args, strict=False)) | kwargs
        for p in self.kernel.params:
            if not p.is_constexpr:
                bound[p.name] = _argument(bound[p.name])
        for n in range(grid[0]):
            for m in range(grid[1] if len(grid) > 1 else 1):
                program = Program((n, m), self.random)
                function = program.of(self.kernel.fn.__globals__)[self.kernel.fn.__name__]
                program.run([lambda f=function: f(**bound)])


def _argument(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer(x.detach())
    if isinstance(x, int):
        return torch.tensor(x)
    return Descriptor(x) if hasattr(x, "block_shape") else x


class Program:
    """One program: its partitions, what is under way, and the names that its code sees."""

    def __init__(self, place: tuple[int, int], draw: random.Random):
        self.place, self.random = place, draw
        self.waiting: dict[int, Any] = {}  # partition → what it waits for, None if it can run
        self.turn, self.error = -1, None
        self.changed = threading.Condition()
        self.copies: list = []  # started, not landed: (partition that stores or None, land)
        self.products: dict[int, list] = {}
        self.unfenced: dict[int, set] = {}
        self.local = threading.local()

    # --- Partitions that take turns ---

    def run(self, functions: list) -> None:
        outer = getattr(self.local, "id", None)
        first = len(self.waiting)
        threads = []
        for n, function in enumerate(functions, first):
            self.waiting[n], self.products[n], self.unfenced[n] = None, [], set()
            threads.append(threading.Thread(target=self._partition, args=(n, function)))
        if outer is not None:  # it goes on when they are done
            self.waiting[outer] = lambda: all(
                self.waiting.get(n, True) is True for n in range(first, first + len(functions))
            )
        for thread in threads:
            thread.start()
        with self.changed:
            self._draw()
        for thread in threads:
            thread.join()
        if outer is not None:
            with self.changed:
                self.waiting[outer] = None
                self.turn = outer
        if self.error is not None:
            raise self.error

    def _partition(self, n: int, function: Any) -> None:
        self.local.id = n
        with self.changed:
            self.changed.wait_for(lambda: self.turn == n or self.error is not None)
        try:
            if self.error is None:
                with torch.no_grad():  # a thread's own
                    function()
                assert not self.products[n], "a product was never waited for"
                assert all(owner != n for owner, _ in self.copies), "left before its copies did"
        except BaseException as error:
            self.error = self.error or error
        with self.changed:
            self.waiting[n] = True  # done
            self._draw()

    def _draw(self) -> None:
        """Let something go on: a copy land (stores as late as they can), a partition run."""
        while self.error is None:
            ready = [n for n, x in self.waiting.items() if x is None or (callable(x) and x())]
            loads = [copy for copy in self.copies if copy[0] is None]
            if not ready and not loads:
                loads = self.copies
            if not ready and not loads:
                left = [n for n, x in self.waiting.items() if x is not True]
                if left:
                    self.error = AssertionError(f"deadlock: partitions {left} wait for ever")
                break
            late = self.random.random() < LATE
            if ready and (late or not loads):
                self.turn = self.random.choice(ready)
                break
            landing = self.random.choice(loads)
            self.copies.remove(landing)
            landing[1]()
        self.changed.notify_all()

    def pause(self, until: Any = None) -> None:
        """Give the turn away; take it back later, when `until()` holds."""
        n = self.local.id
        with self.changed:
            self.waiting[n] = until
            self._draw()
            self.changed.wait_for(lambda: self.turn == n or self.error is not None)
            self.waiting[n] = None
        if self.error is not None:
            raise RuntimeError("stopped") from self.error

    # --- What kernels call ---

    def of(self, module: dict) -> dict:
        """The module's names, with its kernels as plain functions and Gluon as this emulator."""
        names = dict(module)
        names["gl"] = _Language(self)
        names["mbarrier"] = types.SimpleNamespace(
            MBarrierLayout=lambda: None, init=Barrier.init, expect=self._expect, wait=self._wait,
            arrive=self._arrive,
        )  # fmt: skip
        names["tma"] = types.SimpleNamespace(
            async_copy_global_to_shared=self._load,
            async_copy_shared_to_global=self._store,
            store_wait=self._store_wait,
        )
        names["fence_async_shared"] = lambda: self.unfenced[self.local.id].clear()
        names["warpgroup_mma"], names["warpgroup_mma_wait"] = self._product, self._product_wait
        for name, x in module.items():
            if isinstance(x, constexpr):
                names[name] = x.value
            if isinstance(x, GluonJITFunction):
                names[name] = types.FunctionType(x.fn.__code__, names, name, x.fn.__defaults__)
        return names

    def _expect(self, barrier: Shared, nbytes: int) -> None:
        barrier.barrier.bytes += nbytes
        barrier.barrier.arrive(1)
        self.pause()

    def _arrive(self, barrier: Shared, count: int = 1) -> None:
        barrier.barrier.arrive(count)
        self.pause()

    def _wait(self, barrier: Shared, parity: Any) -> None:
        found = barrier.barrier
        self.pause(lambda: found.phase % 2 != int(parity))

    def _load(self, desc: Descriptor, at: list, barrier: Shared, result: Shared) -> None:
        result.data.fill_(float("nan"))

        def land() -> None:
            result.data.copy_(desc.read(at))
            barrier.barrier.bytes -= desc.block_type.nbytes
            barrier.barrier.arrive(0)

        self.copies.append((None, land))
        self.pause()

    def _store(self, desc: Descriptor, at: list, source: Shared) -> None:
        n, seen = self.local.id, source.data.clone()
        assert source.key not in self.unfenced[n], "stored without a fence"

        def land() -> None:
            assert torch.equal(seen, source.data), "overwritten while it was being copied"
            desc.write(at, source.data)

        self.copies.append((n, land))
        self.pause()

    def _store_wait(self, pendings: int) -> None:
        assert pendings == 0
        n = self.local.id
        self.pause(lambda: all(owner != n for owner, _ in self.copies))

    def _product(self, a: Any, b: Shared, acc: Any, use_acc: Any = True, is_async: bool = False):
        n = self.local.id
        shared = [x for x in (a, b) if isinstance(x, Shared)]
        assert all(x.key not in self.unfenced[n] for x in shared), "read without a fence"
        seen = [x.data.clone() for x in shared]

        def value() -> torch.Tensor:
            for x, before in zip(shared, seen, strict=True):
                assert not x.data.isnan().any(), "read before it was there"
                assert torch.equal(x.data, before), "overwritten while it was being read"
            left = a.data if isinstance(a, Shared) else a
            product = left.float() @ b.data.float()
            return product + acc if use_acc else product

        if not is_async:
            assert not self.products[n]
            return value()
        pending = types.SimpleNamespace(value=value, result=None)
        self.products[n].append(pending)
        self.pause()
        return pending

    def _product_wait(self, num_outstanding: int, deps: tuple) -> Any:
        queue = self.products[self.local.id]
        self.pause()
        while len(queue) > num_outstanding:
            done = queue.pop(0)
            done.result = done.value()
        assert all(x.result is not None for x in deps), (
            "a product was used before it was waited for"
        )
        return deps[0].result if len(deps) == 1 else tuple(x.result for x in deps)


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have landed."""

    def __init__(self, count: int):
        self.count = self.left = count
        self.bytes = self.phase = 0

    @staticmethod
    def init(shared: Shared, count: int) -> None:
        shared.cell["barrier"] = Barrier(count)

    def arrive(self, count: int) -> None:
        self.left -= count
        assert self.left >= 0, "more arrivals than a barrier counts"
        if self.left == 0 and self.bytes == 0:
            self.left, self.phase = self.count, self.phase + 1


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, data: torch.Tensor, program: Program, cells: dict, path: tuple = ()):
        self.data, self.program, self.cells, self.path = data, program, cells, path

    dtype = property(lambda self: self.data.dtype)
    shape = property(lambda self: self.data.shape)
    cell = property(lambda self: self.cells.setdefault(self.path, {}))
    barrier = property(lambda self: self.cell["barrier"])
    key = property(
        lambda self: (self.data.untyped_storage().data_ptr(), self.data.storage_offset())
    )

    def index(self, n: Any) -> Shared:
        assert 0 <= int(n) < self.data.shape[0]
        return Shared(self.data[int(n)], self.program, self.cells, (*self.path, int(n)))

    def permute(self, order: tuple) -> Shared:
        return Shared(self.data.permute(order), self.program, self.cells, self.path)

    def store(self, x: torch.Tensor) -> None:
        assert x.shape == self.data.shape and x.dtype == self.data.dtype
        self.data.copy_(x)
        self.program.unfenced[self.program.local.id].add(self.key)

    def load(self, layout: Any) -> torch.Tensor:
        assert not self.data.isnan().any(), "read before it was there"
        return self.data.clone()


class Descriptor:
    """A tensor descriptor; rows and columns outside of the tensor read as zero."""

    def __init__(self, host: Any):
        self.host, self.dtype, self.layout = host, host.base.dtype, None
        self.base = host.base.detach()
        size = host.base.itemsize
        for n in host.block_shape:
            size *= n
        self.block_type = types.SimpleNamespace(nbytes=size, shape=host.block_shape)

    def _places(self, at: list) -> tuple[torch.Tensor, torch.Tensor]:
        host, offset, inside = self.host, torch.zeros(1, dtype=torch.int64), torch.ones(1).bool()
        for start, n, extent, stride in zip(
            at, host.block_shape, host.shape, host.strides, strict=True
        ):
            o = int(start) + torch.arange(n)
            offset = offset[..., None] + o * stride
            inside = inside[..., None] & (o >= 0) & (o < extent)
        return offset[0], inside[0]

    def _flat(self) -> torch.Tensor:
        base = self.base
        size = base.untyped_storage().nbytes() // base.itemsize - base.storage_offset()
        return base.as_strided((size,), (1,))

    def read(self, at: list) -> torch.Tensor:
        offset, inside = self._places(at)
        found = self._flat()[torch.where(inside, offset, 0)]
        return torch.where(inside, found, torch.zeros_like(found))

    def write(self, at: list, x: torch.Tensor) -> None:
        offset, inside = self._places(at)
        self._flat()[offset[inside]] = x[inside]


class Pointer:
    def __init__(self, base: torch.Tensor, offset: Any = 0):
        self.base, self.offset = base, offset
        self.dtype = types.SimpleNamespace(element_ty=base.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.base, self.offset + offset)

    def flat(self) -> torch.Tensor:
        size = self.base.untyped_storage().nbytes() // self.base.itemsize
        return self.base.as_strided((size - self.base.storage_offset(),), (1,))


class _Language:
    """What a kernel calls by `gl.`"""

    def __init__(self, program: Program):
        self._program = program
        for name in DTYPES:
            setattr(self, name, getattr(torch, name))
        for name in ("exp2", "log2", "abs", "ceil", "maximum", "minimum"):
            setattr(self, name, self._wrapped(getattr(torch, name)))
        for name in ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout"):
            setattr(self, name, lambda *a, **k: None)
        self.NVMMASharedLayout = types.SimpleNamespace(get_default_for=lambda *a: None)
        self.constexpr = None

    @staticmethod
    def _wrapped(function: Any) -> Any:
        return lambda *x: function(*(torch.as_tensor(y) for y in x))

    def program_id(self, axis: int) -> torch.Tensor:
        return torch.tensor(self._program.place[axis])

    def allocate_shared_memory(self, dtype: torch.dtype, shape: list, layout: Any) -> Shared:
        data = torch.zeros(shape, dtype=dtype)
        if dtype.is_floating_point:
            data.fill_(float("nan"))
        return Shared(data, self._program, {})

    def warp_specialize(self, parts: list, warps: list, registers: list) -> None:
        assert len(warps) == len(registers) == len(parts) - 1
        self._program.run([lambda f=f, x=x: f(*x) for f, x in parts])

    def arange(self, start: int, stop: int, layout: Any = None) -> torch.Tensor:
        return torch.arange(start, stop)

    def zeros(self, shape: list, dtype: torch.dtype, layout: Any = None) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def static_range(self, *bounds: int) -> range:
        return range(*bounds)

    def static_assert(self, condition: bool) -> None:
        assert condition

    def convert_layout(self, x: torch.Tensor, layout: Any) -> torch.Tensor:
        return x

    def where(self, condition: Any, a: Any, b: Any) -> torch.Tensor:
        return torch.where(torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b))

    def max(self, x: torch.Tensor, axis: int | None = None) -> torch.Tensor:
        return x.amax() if axis is None else x.amax(axis)

    def min(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.amin(axis)

    def sum(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return x.sum(axis)

    def load(self, p: Pointer, mask: Any = None, other: Any = 0) -> torch.Tensor:
        offset = torch.as_tensor(p.offset)
        inside = torch.ones_like(offset, dtype=torch.bool) if mask is None else mask
        offset, inside = torch.broadcast_tensors(offset, torch.as_tensor(inside))
        found = p.flat()[torch.where(inside, offset, 0)]
        return torch.where(inside, found, torch.full_like(found, other))

    def store(self, p: Pointer, x: Any, mask: Any = None) -> None:
        x = torch.as_tensor(x)
        assert not x.is_floating_point() or x.dtype == p.base.dtype, "stored in another dtype"
        offset, x = torch.broadcast_tensors(torch.as_tensor(p.offset), x)
        inside = torch.ones_like(offset, dtype=torch.bool) if mask is None else mask
        inside = torch.as_tensor(inside).expand(offset.shape)
        p.flat()[offset[inside]] = x[inside]
