"""The caches that follow toto-ts's own contract and differ in how they keep and read their write position."""

from typing import Any

import torch
from torch import Tensor
from toto.model.util import KVCache


def _slots(cache: KVCache, tensor: Tensor, start: Any, end: Any) -> Tensor:
    """The time slots [start, end) of one layer's buffer, whichever attention layout toto-ts uses."""
    if cache.use_memory_efficient_attention:
        return tensor[:, start:end]
    return tensor[:, :, start:end]


class ListIndexKVCache(KVCache):
    """Production's cache of 2025-10-30: one Python int per time layer.

    Each int is a constant to dynamo and gets a guard of its own; every layer moves its own int, so the guards fail one
    after the other until `positional_embedding` reaches the recompile limit.
    """

    _current_idx: list[int]
    _layer_cache_map: list[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._layer_cache_map = torch.as_tensor(self._layer_cache_map).tolist()
        self._current_idx = [0] * self._keys.shape[0]

    def __getitem__(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        index = self._layer_cache_map[layer_idx]
        end = self._current_idx[index]
        return _slots(self, self._keys[index], 0, end), _slots(self, self._values[index], 0, end)

    def current_len(self, cache_idx: int) -> int:
        return self._current_idx[cache_idx]

    def seq_len(self, layer_idx: int) -> int:
        return self._current_idx[self._layer_cache_map[layer_idx]]

    def append(self, layer_idx: int, kv: tuple[Tensor, Tensor]) -> None:
        torch._dynamo.graph_break()
        index = self._layer_cache_map[layer_idx]
        keys, values = kv
        start = self._current_idx[index]
        end = start + keys.shape[1 if self.use_memory_efficient_attention else 2]
        if end > self.max_seq_len:
            raise ValueError(f"cache of {self.max_seq_len} patches exceeded: {end}")
        _slots(self, self._keys[index], start, end).copy_(keys)
        _slots(self, self._values[index], start, end).copy_(values)
        self._current_idx[index] = end

    def reset(self) -> None:
        self._keys.zero_()
        self._values.zero_()
        self._current_idx = [0] * len(self._current_idx)


class CompileFriendlyKVCache(KVCache):
    """Tensor position, Python layer map, and explicit graph breaks around the mutation; meant for scalar capture.

    No position is a constant any more, so nothing is guarded per layer - at the price of a break at every append and of
    `.item()` reads, which keep CUDA graphs off.
    """

    _layer_cache_map: list[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._layer_cache_map = torch.as_tensor(self._layer_cache_map).tolist()

    def __getitem__(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        index = self._layer_cache_map[layer_idx]
        end = self._length(index)
        return _slots(self, self._keys[index], 0, end), _slots(self, self._values[index], 0, end)

    def _length(self, index: int) -> int:
        length = int(self._current_idx[index].item())
        torch._check(length >= 0)
        torch._check(length <= self.max_seq_len)
        return length

    def current_len(self, cache_idx: int) -> int:
        return self._length(cache_idx)

    def seq_len(self, layer_idx: int) -> int:
        return self._length(self._layer_cache_map[layer_idx])

    def append(self, layer_idx: int, kv: tuple[Tensor, Tensor]) -> None:
        torch._dynamo.graph_break()
        index = self._layer_cache_map[layer_idx]
        keys, values = kv
        start = self._length(index)
        end = start + keys.shape[1 if self.use_memory_efficient_attention else 2]
        if end > self.max_seq_len:
            raise ValueError(f"cache of {self.max_seq_len} patches exceeded: {end}")
        _slots(self, self._keys[index], start, end).copy_(keys)
        _slots(self, self._values[index], start, end).copy_(values)
        self._current_idx[index] = end
        torch._dynamo.graph_break()
