"""Keys and values in buffers that never grow, move or get sliced: the position is a tensor, the rest is a mask."""

import torch
from torch import Tensor


class FixedSizeKVCache:
    """One full-length buffer per time layer, keys before values, and the slot of the newest patch."""

    def __init__(
        self,
        *,
        layers: int,
        rows: int,
        heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (2, rows, heads, capacity, head_dim)
        # A tensor per layer, not one for all: inductor would copy all of a shared buffer to write a slice of it.
        self.keys_values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.position = torch.full((1,), -1, dtype=torch.int64, device=device)  # slot of the newest patch
        self.slots = torch.arange(capacity, device=device)

    def tensors(self) -> list[Tensor]:
        return [*self.keys_values, self.position, self.slots]

    def advance(self) -> Tensor:
        """Make room for one more patch; its position."""
        return self.position.add_(1)

    def bias(self) -> Tensor:
        """Added to attention scores: 0 for what is written, minus infinity for what is not."""
        zero = torch.zeros_like(self.slots, dtype=self.keys_values[0].dtype)
        return torch.where(self.slots <= self.position, zero, -torch.inf).view(1, 1, 1, -1)

    def write(self, layer: int, keys_values: Tensor) -> Tensor:
        """Put one patch's keys and values at the position; give back the whole buffer."""
        return self.keys_values[layer].index_copy_(3, self.position, keys_values)

    def fill(self, layer: int, keys_values: Tensor) -> None:
        """Put a whole context's keys and values at the start, repeated over the rows that share that context."""
        buffer, (contexts, patches) = self.keys_values[layer], (keys_values.shape[1], keys_values.shape[3])
        used = buffer[:, : buffer.shape[1] // contexts * contexts, :, :patches]
        used.unflatten(1, (-1, contexts)).copy_(keys_values.unsqueeze(1))

    def begin(self, context_patches: int) -> None:
        """The context is in place: the next patch goes right behind it.

        What lies there from before is masked, but read: infinity or NaN of an earlier forecast times 0 is still NaN.
        """
        self.position.fill_(context_patches - 1)
        for buffer in self.keys_values:
            buffer[..., context_patches:, :].zero_()
