"""The state of one rank, and a step loop that computes and really changes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct

from ckptool.commands.bench.specs import TensorSpec
from ckptool.commands.bench.worker.device import Device

_STEP_SECONDS = 0.025
_OCCUPIED_SECONDS = 1.0
_ROWS = 512
_ACCELERATOR_ROWS = 4096
"""Of the matrix that a step multiplies: large enough that starting its products costs nothing."""

_SEED = 20


class Training(Struct):
    """State sharded over the ranks as FSDP2 shards it, and the steps that change it.

    ``state`` is the nested state dict: DTensors of ``Shard(0)``, and plain tensors where there is
    nothing to shard. The same ranks always begin with the same values.
    """

    device: Device
    state: dict[str, Any]
    _matrix: Any
    _products: int = 1
    _sign: float = 1.0

    @staticmethod
    def begin(specs: Sequence[TensorSpec], device: Device) -> Training:
        """Make the state of this rank; the process group must be up."""
        import torch

        state = make_state(specs, device)
        rows = _ACCELERATOR_ROWS if device.is_accelerator else _ROWS
        matrix = torch.randn(rows, rows, device=device.torch_device) / rows**0.5
        training = Training(device, state, matrix)
        training._products = training._calibrate()
        return training

    def empty_state(self) -> dict[str, Any]:
        """Return a state dict of the same shapes, all zeros: what a checkpoint is loaded into."""
        import torch
        from torch.utils._pytree import tree_map_only

        empty: dict[str, Any] = tree_map_only(torch.Tensor, torch.zeros_like, self.state)
        return empty

    def step(
        self, done: bool = True, before_update: Callable[[], object] = lambda: None
    ) -> tuple[float, bool]:
        """Train one step; return its seconds, and whether every rank says ``done``.

        ``before_update`` is called after the forward and backward pass.
        """
        import torch
        import torch.distributed as dist

        begin = time.perf_counter()
        self._compute(self._products)
        before_update()
        self._update()
        flag = torch.tensor(int(done), device=self.device.torch_device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        agreed = bool(flag.item())
        return time.perf_counter() - begin, agreed

    def change_everything(self) -> None:
        """Invert every bit of every tensor: whatever is read from here on is not the state.

        That happens beside whatever is queued on the stream that trains, not after it.
        """
        with self.device.another_stream():
            for local in shards(self.state).values():
                invert(local)

    def occupy(self) -> None:
        """Queue a second of work on the stream of an accelerator that trains, and go on."""
        import torch

        if self.device.is_accelerator:
            product = torch.empty_like(self._matrix)
            for _ in range(self._products * round(_OCCUPIED_SECONDS / _STEP_SECONDS)):
                torch.mm(self._matrix, self._matrix, out=product)

    def _compute(self, products: int) -> None:
        for _ in range(products):
            self._matrix = self._matrix @ self._matrix
            self._matrix /= self._matrix.norm()

    def _update(self) -> None:
        """Read and write every floating element, as an optimizer does; none stays as it was."""
        import torch

        groups: dict[Any, list[Any]] = {}
        for local in filter(_has_arithmetic, shards(self.state).values()):
            groups.setdefault((local.device, local.dtype), []).append(local)
        self._sign = -self._sign
        for group in groups.values():
            torch._foreach_mul_(group, 0.9)
            torch._foreach_add_(group, 0.1 * self._sign)
        self.state["step"] += 1

    def _calibrate(self) -> int:
        """Return how many products make a step of ``_STEP_SECONDS``, the same on every rank."""
        import torch
        import torch.distributed as dist

        self._compute(1)
        self.device.synchronize()
        begin = time.perf_counter()
        self._compute(2)
        self.device.synchronize()
        count = max(1, round(2 * _STEP_SECONDS / (time.perf_counter() - begin)))
        agreed = torch.tensor(count, device=self.device.torch_device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        return int(agreed.item())


def make_state(specs: Sequence[TensorSpec], device: Device) -> dict[str, Any]:
    """Make the tensors of this rank, sharded over all, with values; and the number of steps."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    torch.manual_seed(_SEED + dist.get_rank())
    state: dict[str, Any] = {"step": 0}
    for spec in specs:
        inner = state
        for key in spec.path[:-1]:
            inner = inner.setdefault(key, {})
        inner[spec.path[-1]] = _tensor(spec, mesh)
    return state


def _tensor(spec: TensorSpec, mesh: Any) -> Any:
    """Make a tensor of ``spec`` with values; each rank has rows of its own."""
    import torch
    from torch.distributed.tensor import Shard, empty

    dtype = getattr(torch, spec.dtype)
    if not spec.shape:
        return torch.ones((), dtype=dtype)  # the same on every rank
    tensor = empty(*spec.shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
    local = tensor.to_local()
    if _has_arithmetic(local):
        local.normal_()
    elif local.dtype == torch.bool:
        local.random_(0, 2)
    elif local.numel():
        local.view(-1).view(torch.uint8).random_(0, 256)
    return tensor


def _has_arithmetic(local: Any) -> bool:
    """Whether torch can do arithmetic on it: floating, and of more than a byte."""
    return bool(local.is_floating_point()) and local.element_size() > 1


def invert(local: Any) -> None:
    """Invert every bit of a tensor."""
    import torch

    if local.dtype == torch.bool:
        local.logical_not_()
    elif local.numel():
        local.view(-1).view(torch.uint8).bitwise_not_()


def shards(state: dict[str, Any]) -> dict[str, Any]:
    """Return what this rank holds of every tensor, by its dotted name."""
    from torch.distributed.tensor import DTensor

    return {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for name, tensor in _tensors(state, "")
    }


def _tensors(state: dict[str, Any], head: str) -> Iterator[tuple[str, Any]]:
    import torch

    for key, value in state.items():
        if isinstance(value, dict):
            yield from _tensors(value, f"{head}{key}.")
        elif isinstance(value, torch.Tensor):
            yield f"{head}{key}", value
